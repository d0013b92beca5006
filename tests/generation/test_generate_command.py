"""`kenotron generate` and the seeds' `run_generate.py`, called as a shell would."""

import io
import json
import socket
import sys

import pytest

import kenotron as kn
from kenotron.cli import rank0
from kenotron.cli.nanotron_scripts import run_generate
from kenotron.config import InputError
from kenotron.config.parallelism import Parallelism
from kenotron.generation import SamplingOptions, generate
from kenotron.generation.layout import choose_layout
from kenotron.generation.load import load_for_generation
from support.tiny_llamas import our_model, save_ours, small_tokenizer

NO_EFFECT = "changes nothing at temperature 0, which is greedy; set a temperature, such as 1.0"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("command")
    return save_ours(our_model(folder), folder / "checkpoints", small_tokenizer())


@pytest.fixture(scope="module")
def loaded(path):
    return load_for_generation(path)


def test_json_gives_an_object_a_prompt_and_line(shell, path, loaded):
    """Those of the library's two functions."""
    options = ("--max-new-tokens", 6, "--temperature", 0.9, "--top-k", 50, "--top-p", 0.9, "--seed", 4, "--no-eos-stop")
    drawn = {"max_new_tokens": 6, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 4, "stop_at_eos": False}
    code, out, _ = shell("generate", path, "--prompt", "é 中", "--prompt-tokens", "70,71", *options, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    expected = generate(loaded.model, loaded.tokenizer, ["é 中", [70, 71]], SamplingOptions(**drawn))
    assert code == 0
    assert found == [as_printed(completion) for completion in expected]
    assert list(found[0]) == ["prompt", "text", "tokens", "stopped_by"]
    assert [as_printed(each) for each in kn.generate(path.parent, ["é 中", [70, 71]], **drawn)] == found
    (single,) = kn.generate(str(path), "é 中", batch_size=1, dtype="float32", **drawn)
    assert as_printed(single) == found[0]


def as_printed(completion):
    return {name: value for name, value in vars(completion).items() if value is not None}


def test_stop_strings_penalty_min_p_and_log_probabilities_are_options(shell, path, loaded):
    prompts, common = ("--prompt", "def", "--prompt", "cat"), ("--max-new-tokens", 8, "--json")
    given = ("--temperature", 1.2, "--min-p", 0.05, "--repetition-penalty", 1.4, "--stop", "e", "--stop", "a")
    code, out, _ = shell("generate", path, *prompts, *common, *given, "--logprobs")
    options = {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.4, "stop": ["e", "a"], "logprobs": True}
    expected = generate(loaded.model, loaded.tokenizer, ["def", "cat"], SamplingOptions(max_new_tokens=8, **options))
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [as_printed(completion) for completion in expected]
    assert {one.stopped_by for one in expected} & {"stop"}
    assert kn.generate(path, ["def", "cat"], max_new_tokens=8, **options) == expected
    seeds = shell("--ckpt-path", path, *prompts, *common, *given, "--logprobs", command=run_generate)
    assert seeds == (0, out, "")


def test_a_prompt_of_kn_generate_that_is_neither_text_nor_ids_is_named(path):
    for wrong in (70, ["a"]):
        with pytest.raises(InputError, match="prompt 1: expected a text or a list of token ids, found "):
            kn.generate(path, [wrong])


def test_streaming_prints_what_is_printed_at_once(shell, path):
    options = ("--prompt", "def", "--prompt", "cat", "--prompt-tokens", "70,71", "--temperature", 2.0)
    at_once = shell("generate", path, *options, "--batch-size", 2)
    assert shell("generate", path, *options, "--stream") == at_once


def test_prompts_come_from_the_command_line_a_file_and_stdin(shell, path, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("def main\n\n  the cat\n")
    _, out, _ = shell("generate", path, "--prompt", "first", "--prompt-file", file, "--json")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["first", "def main", "  the cat"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve 中\n".encode())))
    _, out, _ = shell("generate", path, "--prompt-file", "-", "--json")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["naïve 中"]


def test_ids_are_continued_without_a_tokenizer(shell, tmp_path):
    path = save_ours(our_model(tmp_path), tmp_path / "c")
    model = load_for_generation(path).model
    [expected] = generate(model, None, [[5, 6, 7]], SamplingOptions(max_new_tokens=4))
    code, out, _ = shell("generate", path, "--prompt-tokens", "5, 6 7", "--max-new-tokens", 4)
    assert (code, out) == (0, " ".join(map(str, expected.tokens)) + "\n")
    code, out, err = shell("generate", path)
    assert (code, out) == (2, "")
    assert err == f"error: {path} has no tokenizer: give --prompt-tokens 1,2,3 instead of text\n"
    code, out, err = shell("generate", path, "--prompt-tokens", "5", "--stream")
    assert (code, out) == (2, "")
    assert err == f"error: --stream: {path} has no tokenizer, so there is no text to print as it comes\n"


def test_an_early_end_is_said_on_stderr(shell, path):
    code, _, err = shell("generate", path, "--prompt-tokens", "1,2", "--max-new-tokens", 500, "--no-eos-stop")
    assert code == 0
    assert err == "prompt 1: stopped at the model's max_position_embeddings\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stream", "--json"], "--stream and --json: give only one of them"),
        (["--logprobs"], "--logprobs: needs --json, as plain text has no place for them"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file: cannot read nowhere.txt: No such file or directory"),
        (["--prompt-tokens", "1,two"], "--prompt-tokens: expected ids such as 1,17,4, found '1,two'"),
        (["--top-p", "0.9"], f"top_p: {NO_EFFECT}"),
        (["--tp", 3], "--tp: expected a divisor of num_attention_heads 4, found 3"),
        (["--pp", 3], "--pp: expected at most num_hidden_layers 2 stages, found 3"),
        (["--ep", 2], "--ep: expected 1: the family llama has no experts; found 2"),
        (["--dp", 3, "--ep", 2], "--ep: expected a divisor of --dp 3, whose ranks share the experts; found 2"),
        (["--dtype", "int8"], "not supported yet: generation in dtype 'int8' (supported: float32, bfloat16, float16)"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(shell, path, arguments, message):
    assert shell("generate", path, *arguments) == (2, "", f"error: {message}\n")


def test_the_seeds_command_is_the_same_thing(shell, path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # as under torchrun
    seeds = shell("--ckpt-path", f"{path}/", "--tp", 1, "--pp", 1, "--use-cache", command=run_generate)
    assert seeds == shell("generate", path, "--max-new-tokens", 128)
    assert seeds[0] == 0


@pytest.mark.parametrize(
    ("given", "saved", "processes", "expected"),
    [
        *(((None, None, None), (2, 2, 2), 8, (2, 2, 2)), ((None, None, None), (4, 2, 2), 8, (2, 2, 2))),
        *(((None, None, None), (1, 1, 1), 8, (8, 1, 1)), ((None, None, None), (2, 2, 2), 1, (1, 1, 1))),
        *(((None, None, None), (2, 2, 2), None, (1, 1, 1)), ((None, None, 1), (2, 2, 2), 2, (1, 2, 1))),
        *(((None, 1, 1), (2, 2, 2), 1, (1, 1, 1)), ((None, 4, None), (2, 2, 2), 4, (1, 4, 1))),
        *(((2, 2, None), (2, 2, 2), 8, (2, 2, 2)), ((None, None, 2), (2, 2, 2), None, (1, 1, 2))),
    ],
)
def test_degrees_that_are_not_given_are_the_checkpoints_where_the_processes_fit(given, saved, processes, expected):
    trained = Parallelism(**dict(zip(("dp", "pp", "tp"), saved)))
    chosen = choose_layout(*given, trained, processes)
    assert (chosen.dp, chosen.pp, chosen.tp) == expected


@pytest.mark.parametrize(("given", "processes"), [((None, None, None), 6), ((1, None, None), 8), ((3, 2, 2), 8)])
def test_degrees_that_fit_no_layout_are_refused_with_the_arithmetic(given, processes):
    with pytest.raises(InputError, match=rf"needs \d+ process(es)?, but {processes} were started"):
        choose_layout(*given, Parallelism(dp=2, pp=2, tp=2), processes)


def test_in_the_seeds_spelling_0_is_1(shell, path):
    zeros = shell("--ckpt-path", path, "--tp", 0, "--pp", 0, "--dp", 0, "--max-new-tokens", 5, command=run_generate)
    assert zeros == shell("generate", path, "--max-new-tokens", 5)


def test_degrees_that_do_not_make_torchruns_processes_are_refused_with_the_arithmetic(shell, path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(rank0, "RANK0_REPORTS_WITHIN_S", 0.0)  # within which torchrun ends rank 1
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        code, _, err = shell("--ckpt-path", path, "--tp", 2, "--pp", 2, command=run_generate)
        assert code == 2
        said.append(err)
    message = "--dp 1 x --pp 2 x --tp 2 needs 4 processes, but 2 were started\n"
    assert said == [f"error: {message}", f"error: rank 1 on {socket.gethostname()}: {message}"]


# On local ranks ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_tensor_parallel_ranks_stream_what_one_process_does(shell, path):
    options = ("--prompt", "def", "--prompt-tokens", "70,71", "--temperature", 2.0, "--stream")
    assert shell("generate", path, *options, "--tp", 2) == shell("generate", path, *options)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", 2), ("--pp", 2), ("--dp", 2)])
def test_ranks_agree_on_log_probabilities_and_penalties(layout, shell, path):
    options = ("--prompt", "def", "--prompt", "cat", "--repetition-penalty", 1.3, "--stop", "a", "--logprobs", "--json")
    alone, together = (shell("generate", path, *options, *more) for more in ((), layout))
    found, expected = ([json.loads(line) for line in said[1].splitlines()] for said in (together, alone))
    for one, other in zip(found, expected, strict=True):
        assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), abs=1e-4)
        assert one == other


@pytest.mark.slow
def test_two_replicas_share_out_the_prompts_of_stdin_and_rank_0_prints_all(shell, path, monkeypatch):
    said = []
    for dp in (1, 2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("naïve 中\ndef\ncat\n".encode())))
        said.append(shell("generate", path, "--prompt-file", "-", "--json", "--max-new-tokens", 6, "--dp", dp))
    assert said[0] == said[1]
    assert said[0][0] == 0
    assert len(said[0][1].splitlines()) == 3


@pytest.mark.slow
def test_what_is_wrong_on_all_ranks_is_reported_once(shell, path):
    assert shell("generate", path, "--pp", 2, "--top-p", 0.9) == (2, "", f"error: top_p: {NO_EFFECT}\n")
