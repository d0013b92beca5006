"""The seeds' walkthrough: their config, unchanged, by their own commands, with the hub's files in a local cache."""

import json
import math
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kenotron as kn
from kenotron.config.writing import diff
from support.hub_cache import TOKENIZER, offline_environment
from support.nursery import Finished, Nursery
from support.tiny_run import REPOSITORY, environment, saved_weights

ONE_PROCESS = "examples/config_tiny_llama-david.yaml"
EIGHT_PROCESSES = "examples/llama/config_tiny_llama.yaml"
COMMENTS = {"dp": "数据并行大小", "pp": "流水线并行大小", "tp": "张量并行大小"}  # all that our copy leaves out

# What the seeds' log and the issue give.
LEARNING_RATES = """0.00015 0.0003 0.000296 0.000283 0.000264 0.000237 0.000206 0.000172 0.000138 0.000104
    7.26e-05 4.65e-05 2.66e-05 1.42e-05 1e-05"""
CONSUMED = "512 1.02K 1.54K 2.05K 2.56K 3.07K 3.58K 4.1K 4.61K 5.12K 5.63K 6.14K 6.66K 7.17K 7.68K"
Run = Callable[..., Finished]
Walked = tuple[Path, subprocess.CompletedProcess[str]]
Steps = list[dict[str, float]]
TRAIN = ("--config-file", ONE_PROCESS)
PROMPTS_NAMED = "no --prompt: continuing 'The future of AI is' and 'def fib(n)'\n"
TWO_PROMPTS = re.compile(r"The future of AI is.{20,}\n\ndef fib\(n\)", re.DOTALL)
LINE = re.compile(r"^\d\d/\d\d/\d{4} \d\d:\d\d:\d\d \[(?:INFO|WARNING)\|DP=0\|PP=0\|TP=0\]: (.*)$")


def settings(folder: Path, home: Path) -> dict[str, str]:
    return offline_environment(home) | {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTHONPATH": str(Path(__file__).parent / "no_network"),
        "KENOTRON_CACHE": str(folder / "cache"),
    }


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory, hub_home: Path) -> Walked:
    """The folder after ``CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node=1 run_train.py …``, and what it said.

    There is no way out of this machine.
    """
    folder = tmp_path_factory.mktemp("walkthrough")
    text = (REPOSITORY / ONE_PROCESS).read_text()
    for axis, comment in COMMENTS.items():
        text = text.replace(f"  {axis}: 1\n", f"  {axis}: 1  # {comment}\n")
    (folder / "examples").mkdir()
    (folder / ONE_PROCESS).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", REPOSITORY / "run_train.py", *TRAIN]
    env = environment(folder, **settings(folder, hub_home))
    return folder, subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def messages(walked: Walked) -> list[str]:
    """Every line of the log without its prefix, which each must have."""
    lines = walked[1].stdout.splitlines()
    without = [line for line in lines if not LINE.match(line)]
    assert not without, f"lines without the seeds' prefix: {without[:3]}"
    return [LINE.sub(r"\1", line) for line in lines]


@pytest.fixture(scope="module")
def steps(walked: Walked) -> Steps:
    """The objects of metrics.jsonl."""
    (path,) = (walked[0] / "logs").glob("*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_seeds_config_trains_by_the_seeds_command(walked) -> None:
    assert (walked[1].returncode, walked[1].stderr) == (0, "")  # nor did a socket leave the machine


def test_the_watch_on_sockets_is_awake(tmp_path: Path) -> None:
    code = "import socket; socket.create_connection(('192.0.2.1', 9), timeout=1)"
    watched = {"PYTHONPATH": str(Path(__file__).parent / "no_network")}
    process = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path, **watched), capture_output=True)
    assert process.returncode != 0
    assert b"NETWORK: socket.connect" in process.stderr
    assert socket.create_server(("127.0.0.1", 0))  # here, in the tests, nothing is closed


@pytest.mark.slow
def test_the_model_has_12368_parameters(walked, messages: list[str]) -> None:
    for which in ("Total", "Local"):
        assert any(message.startswith(f"{which} number of parameters: 12.4K (0.05MiB)") for message in messages)
    assert sum(tensor.numel() for tensor in saved_weights(walked[0] / "checkpoints" / "15").values()) == 12368


@pytest.mark.slow
def test_numbers_of_steps_printed_and_written_are_the_seeds(messages: list[str], steps: Steps) -> None:
    lines = [message for message in messages if message.startswith("iteration: ")]
    iterations = [dict(field.split(": ", 1) for field in line.split(" | ")) for line in lines]
    assert [fields["lr"] for fields in iterations] == LEARNING_RATES.split()
    assert [float(f"{step['lr']:.3g}") for step in steps] == [float(rate) for rate in LEARNING_RATES.split()]
    assert [fields["consumed_tokens"] for fields in iterations] == CONSUMED.split()
    assert [step["consumed_tokens"] for step in steps] == [512 * (k + 1) for k in range(15)]
    assert {fields["global_batch_size"] for fields in iterations} == {"2"}


@pytest.mark.slow
def test_the_loss_starts_at_that_of_a_uniform_guess_and_falls(steps: Steps) -> None:
    assert abs(steps[0]["lm_loss"] - math.log(256)) < 0.1  # std 0.025 at width 16: the logits are almost equal
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"]


@pytest.mark.slow
def test_the_log_has_every_line_of_the_seeds(messages: list[str]) -> None:
    expected = [
        "Config:",
        "Model Config:",
        "Building model..",
        "Setting PP block ranks...",
        "Total number of parameters: ",
        "Local number of parameters: ",
        "[After model building] Memory usage: ",
        "No checkpoint path provided.",
        "Parametrizing model parameters using StandardParametrizator",
        "[Optimizer Building] Using LearningRateForSP as learning rate",
        "[Training Plan] Stage Stable Training Stage has 9 remaining training steps and has consumed 0 samples",
        "Using `datasets` library",
        f"Loading tokenizer from {TOKENIZER} and transformers/hf_hub versions ('",
        "[Training Plan] There are 2 training stages",
        "[Stage Stable Training Stage] start from step 1",
        "[Start training] datetime: ",
        "Resuming training from stage Stable Training Stage, it has trained for 0 samples and has 9 remaining ",
        " Memory usage: ",
        "iteration: 1 / 15 | ",
        " Memory usage: ",
        "iteration: 2 / 15 | ",
        "Saving checkpoint at checkpoints/10",
    ]
    found = iter(messages)
    for start in expected:  # in this order
        assert any(message.startswith(start) for message in found), start
    assert "  hidden_size: 16" in [message[2:] for message in messages]
    assert "hidden_size: 16" in messages
    assert any("Stage Annealing Phase has 6 remaining training steps" in message for message in messages)


@pytest.fixture
def again(walked, hub_home: Path, nursery: Nursery) -> Run:
    """Another command in the walkthrough's folder: `torchrun`, whose ranks are forks of one process."""
    env = settings(walked[0], hub_home)
    return lambda script, *given, ranks=1: nursery.torchrun(script, *given, ranks=ranks, folder=walked[0], env=env)


@pytest.mark.slow
def test_processes_that_do_not_fit_the_layout_are_reported_once_and_at_the_end(again: Run) -> None:
    finished = again("run_train.py", *TRAIN, ranks=2)
    line = "error: parallelism: dp 1 x pp 1 x tp 1 x cp 1 needs 1 process, but 2 were started"
    lines = finished.stderr.splitlines()
    assert lines.count(line) == 1  # rank 0's; what follows is torchrun's own report
    assert f"traceback : {line}" in [each.strip() for each in lines]
    assert "exitcode  : 2 " in finished.stderr
    assert finished.code != 0


@pytest.mark.slow
def test_the_same_command_again_says_that_the_run_is_finished(walked, again: Run) -> None:
    before = sorted((walked[0] / "logs").iterdir())
    finished = again("run_train.py", *TRAIN)
    assert (finished.code, finished.stderr) == (0, "")
    assert "This run is finished: checkpoints/15 has all 15 steps" in finished.stdout
    assert sorted((walked[0] / "logs").iterdir()) == before


def test_the_seeds_two_configs_differ_in_the_layout_alone() -> None:
    one, eight = (kn.load(REPOSITORY / path) for path in (ONE_PROCESS, EIGHT_PROCESSES))
    changes = {"parallelism.dp": (1, 2), "parallelism.pp": (1, 2), "parallelism.tp": (1, 2)}
    assert {path: (before, after) for path, before, after in diff(one, eight)} == changes


@pytest.fixture
def forked(tmp_path: Path, hub_home: Path, nursery: Nursery) -> Run:
    """`torchrun` in a folder with the examples, as the repository's root; its ranks are forks of one process."""
    ignored = shutil.ignore_patterns("checkpoints", "logs", "__pycache__")
    shutil.copytree(REPOSITORY / "examples", tmp_path / "examples", ignore=ignored)
    env = settings(tmp_path, hub_home)
    return lambda script, *given, ranks=1: nursery.torchrun(script, *given, ranks=ranks, folder=tmp_path, env=env)


@pytest.mark.slow
def test_kenotrons_command_trains_on_8_ranks_and_any_layout_decodes_what_it_saved(forked: Run) -> None:
    trained = forked("run_train.py", "--config-file", EIGHT_PROCESSES, ranks=8)
    assert (trained.code, trained.stderr) == (0, "")
    assert "iteration: 15 / 15" in trained.stdout
    continued = forked("run_generate.py", "--ckpt-path", "checkpoints/10/", "--tp", "1", "--pp", "1")
    assert (continued.code, continued.stderr) == (0, PROMPTS_NAMED)
    assert TWO_PROMPTS.match(continued.stdout)
    drawn = ("--temperature", "1.0", "--dtype", "float32", "--json")
    prompts = ("--prompt", "word3 word4 word5", "--prompt", "word80", "--prompt", "word9 word1")
    given = ("--ckpt-path", "checkpoints/15/", *drawn, *prompts)
    alone = forked("run_generate.py", *given)
    split = forked("run_generate.py", *given, "--tp", "2", "--pp", "2", ranks=4)
    assert (alone.code, alone.stderr, split.code, split.stderr) == (0, "", 0, "")
    completions = [json.loads(line) for line in alone.stdout.splitlines()]
    assert [len(set(completion["tokens"])) > 10 for completion in completions] == [True] * 3
    assert [json.loads(line) for line in split.stdout.splitlines()] == completions


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_the_8_process_commands_of_the_first_readme_work_without_a_network(forked: Run) -> None:
    """run_train.py with debug_run_train.yaml, then run_generation.py on the checkpoint's own layout."""
    trained = forked("run_train.py", "--config-file", "examples/debug_run_train.yaml", ranks=8)
    assert (trained.code, trained.stderr) == (0, "")
    assert "Saved checkpoint at checkpoints/text/4" in trained.stdout
    given = ("--ckpt-path", "checkpoints/text/4")
    said = forked("run_generation.py", *given, ranks=8)
    assert (said.code, said.stderr) == (0, PROMPTS_NAMED)
    assert TWO_PROMPTS.match(said.stdout)
    exact = (*given, "--dtype", "float32", "--json", "--max-new-tokens", "16")
    eight = forked("run_generation.py", *exact, ranks=8)
    one = forked("run_generation.py", *exact)
    assert eight.stdout == one.stdout
    assert len(one.stdout.splitlines()) == 2
