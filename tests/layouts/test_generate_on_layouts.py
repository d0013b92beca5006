"""Decoding on any layout gives one process's tokens, whatever layout the checkpoint was saved on."""

import logging
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.generation import Completion, SamplingOptions, generate
from kenotron.generation.load import load_for_generation
from kenotron.observers.samples import SampleCompletions
from kenotron.parallel.mesh import Mesh, axes, build_mesh
from kenotron.training.run_folder import log_folder
from support.families import hf_model, save
from support.layout_runs import Problem, heard, prepared, steps
from support.ranks import run_ranks
from support.tiny_llamas import our_model, random_tokens, save_ours, small_tokenizer
from support.tiny_run import text_overrides

SHAPE = {"num_hidden_layers": 3, "vocab_size": 301}  # neither stages nor vocabulary rows come out even
LENGTHS = (7, 1, 12, 4, 9)
PROMPTS = [(random_tokens(1, length, number)[0] % 300).tolist() for number, length in enumerate(LENGTHS)]
GREEDY = SamplingOptions(max_new_tokens=10)
DRAWN = replace(GREEDY, temperature=1.3, top_k=100, top_p=0.95, seed=5)
SLOW = pytest.mark.slow  # what the layouts without it meet as well
LAYOUTS = [
    {"tp": 4},  # two key-value heads over four ranks
    *({"dp_replicate": 2}, {"pp": 2, "tp": 2}, {"pp": 3}, {"pp": 2, "dp_replicate": 2, "tp": 2}),
    *(pytest.param(each, marks=SLOW) for each in ({"tp": 2}, {"pp": 2}, {"dp_replicate": 2, "tp": 2})),
]


def named(degrees: dict[str, int]) -> str:
    return " ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def world(degrees: dict[str, int]) -> int:
    return prod(degree for axis, degree in degrees.items() if axis != "ep")  # that is some of dp


def saved(root: Path, **changes: Any) -> Path:
    """A checkpoint of a model whose end-of-text token is one that its first greedy text meets."""
    model = our_model(root, **SHAPE | changes)
    free = generate(model, None, [PROMPTS[0]], SamplingOptions(max_new_tokens=6, stop_at_eos=False))
    return save_ours(model, root / "checkpoints", **SHAPE | changes | {"eos_token_id": free[0].tokens[3]})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("generate"))


def decode(rank: int, degrees: dict[str, int], path: Path, prompts: Any, *options: SamplingOptions) -> Any:
    mesh = build_mesh(degrees, world(degrees), "cpu")
    model = load_for_generation(path, None, "cpu", mesh).model
    return [generate(model, None, prompts, each, batch_size=2) for each in options]


def alone(path: Path, *options: SamplingOptions) -> Any:
    return decode(0, {}, path, PROMPTS, *options)


@pytest.mark.cases(1)
@pytest.mark.budget(8, reason="up to eight ranks on two cores decode twice")
@pytest.mark.parametrize("degrees", LAYOUTS, ids=named)
def test_every_rank_gets_the_tokens_of_one_process_greedy_and_drawn(degrees: dict[str, int], path: Path) -> None:
    greedy, drawn = alone(path, GREEDY, DRAWN)
    assert len({len(completion.tokens) for completion in greedy}) > 1, "some row ends before the others"
    for rank in run_ranks(world(degrees), decode, degrees, path, PROMPTS, GREEDY, DRAWN):
        assert rank == [greedy, drawn]


def test_a_tied_head_and_biases_are_found_on_every_layout(tmp_path: Path) -> None:
    path = saved(tmp_path, tie_word_embeddings=True, attention_bias=True, rope_interleaved=True)
    expected = alone(path, GREEDY)
    for degrees in ({"pp": 2}, {"tp": 2}):
        assert run_ranks(2, decode, degrees, path, PROMPTS, GREEDY) == [expected] * 2, named(degrees)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["mamba", "mamba2", "mamba2_of_one_group", "nano", "nano_with_value_embeddings", "nemotron_h", "nemotron_h_biased"],
)
def test_what_a_family_remembers_is_kept_on_every_layout(family: str, tmp_path: Path) -> None:
    path = save(hf_model(family), tmp_path / family)
    expected = alone(path, GREEDY)
    for degrees in ({"pp": 2}, {"pp": 2, "tp": 2}):
        ranks = run_ranks(world(degrees), decode, degrees, path, PROMPTS, GREEDY)
        assert ranks == [expected] * world(degrees), named(degrees)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_replicate": 2, "ep": 2},
        pytest.param({"dp_replicate": 4, "ep": 2}, marks=SLOW),
        pytest.param({"pp": 2, "dp_replicate": 2, "tp": 2, "ep": 2}, marks=SLOW),
    ],
    ids=named,
)
def test_experts_are_shared_by_ranks_that_decode_the_same_prompts(degrees: dict[str, int], tmp_path: Path) -> None:
    model = hf_model("qwen3_moe")
    path = save(model, tmp_path / "sparse")
    greedy, drawn = alone(path, GREEDY, DRAWN)
    for rank in run_ranks(world(degrees), decode, degrees, path, PROMPTS, GREEDY, DRAWN):
        assert rank == [greedy, drawn]
    whole = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    ranks = run_ranks(world(degrees), experts_held, degrees, path)
    assert sum(ranks) == whole * degrees["dp_replicate"] // degrees["ep"]


def experts_held(rank: int, degrees: dict[str, int], path: Path) -> int:
    model = load_for_generation(path, None, "cpu", build_mesh(degrees, world(degrees), "cpu")).model
    named_here = (pair for part in model.parts for pair in part.named_parameters())
    return sum(parameter.to_local().numel() for name, parameter in named_here if ".experts." in name)


def test_rope_that_grows_with_the_text_grows_alike_on_every_rank(tmp_path: Path) -> None:
    path = saved(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=16)
    assert run_ranks(2, decode, {"pp": 2}, path, PROMPTS, GREEDY) == [alone(path, GREEDY)] * 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("count", [0, 1])
def test_fewer_prompts_than_replicas_are_no_reason_to_wait(count: int, path: Path) -> None:
    [expected] = alone(path, DRAWN)
    for rank in run_ranks(2, decode, {"dp_replicate": 2}, path, PROMPTS[:count], DRAWN):
        assert rank == [expected[:count]]


def held(rank: int, degrees: dict[str, int], path: Path, dtype: str) -> tuple[int, set[torch.dtype], list[int]]:
    """Numbers of weights here, their types, and the layers of which keys are remembered."""
    mesh = build_mesh(degrees, world(degrees), "cpu")
    model = load_for_generation(path, dtype, "cpu", mesh).model
    generate(model, None, PROMPTS, SamplingOptions(max_new_tokens=2))
    local = [parameter.to_local() for part in model.parts for parameter in part.parameters()]
    layers = [int(layer) for part in model.parts for layer in part.model.layers]
    return sum(tensor.numel() for tensor in local), {tensor.dtype for tensor in local}, layers


def test_a_rank_holds_its_share_of_the_weights_in_the_dtype_asked_for(path: Path, tmp_path: Path) -> None:
    whole = sum(parameter.numel() for parameter in our_model(tmp_path, **SHAPE).parameters())
    ranks = run_ranks(4, held, {"pp": 2, "tp": 2}, path, "float16")
    assert all(dtypes == {torch.float16} for _, dtypes, _ in ranks)
    assert [layers for *_, layers in ranks] == [[0, 1], [0, 1], [2], [2]]
    norms_and_padding = 7 * 32 + 2 * 32  # held twice over tp; a row of padding for embedding and head
    assert sum(count for count, *_ in ranks) == whole + norms_and_padding


def listen(rank: int, path: Path, prompts: list[str]) -> tuple[list[tuple[int, str]], list[Completion]]:
    mesh = build_mesh({"dp_replicate": 2}, 2, "cpu")
    model, tokenizer, _ = load_for_generation(path, None, "cpu", mesh)
    pieces: list[tuple[int, str]] = []
    stream = (lambda number, piece: pieces.append((number, piece))) if rank == 0 else None
    options = SamplingOptions(max_new_tokens=12, temperature=2.0)
    return pieces, generate(model, tokenizer, prompts, options, batch_size=1, stream=stream)


def test_rank_0_hears_the_pieces_of_all_replicas_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    path = save_ours(our_model(tmp_path), tmp_path / "checkpoints", small_tokenizer())
    prompts = ["def main", "é 中", "cat"]
    (pieces, completions), (silent, others) = run_ranks(2, listen, path, prompts)
    assert silent == []
    assert completions == others
    assert [number for number, _ in pieces] == sorted(number for number, _ in pieces)
    assert len(pieces) > 3, "the first replica's come one by one"
    texts = ["".join(piece for number, piece in pieces if number == index) for index in range(3)]
    assert texts == [completion.text for completion in completions]


# Samples while training ---------------------------------------------------------------------------


def train_with_samples(problem: Problem, layout: str, folder: Path, mesh: Mesh) -> tuple[list[str], list[float]]:
    """What the run's logger says of samples, and the losses."""
    config = problem.config(layout, folder)
    log_folder(config).mkdir(parents=True, exist_ok=True)
    with prepared(config, mesh) as run, heard(logging.INFO) as said:
        masters = [parameter for part in run.parts for parameter in part.parameters()]
        hook = SampleCompletions()
        hook.on_train_start(run)
        shown = [parameter for part in run.parts for parameter in part.parameters()]
        assert all(one is other for one, other in zip(masters, shown, strict=True)), "copies in their place"
        results = steps(run)
        hook.on_train_end(run)
        assert all(part.training for part in run.parts)
    return [line for line in said if "Sample" in line], [result.lm_loss for result in results]


def sampling_rank(rank: int, problem: Problem, layout: str, folder: Path) -> tuple[list[str], list[float]]:
    config = problem.config(layout, folder)
    return train_with_samples(problem, layout, folder, build_mesh(axes(config), config.parallelism.world_size, "cpu"))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Problem, Path, list[str], list[float]]:
    """A run of one process that shows samples before and after two steps."""
    folder = tmp_path_factory.mktemp("samples")
    overrides = (*text_overrides(folder), 'logging.sample_prompts=["The sum", "of 3"]')
    problem = Problem("samples", overrides, steps=2, model={"num_hidden_layers": 4, "num_attention_heads": 4})
    messages, losses = train_with_samples(problem, "", folder, Mesh())
    return problem, folder, messages, losses


@pytest.mark.cases(1)
@pytest.mark.budget(8, reason="four ranks on two cores decode twice while they train")
@pytest.mark.parametrize(
    "layout",
    [
        *("pp=2 engine=zbv_zero_bubble accum=4", "dp=2 tp=2 zero=3 mode=REDUCE_SCATTER", "pp=2 cp=2"),
        *(pytest.param(each, marks=SLOW) for each in ("dp=2", "dp=2 zero=1", "dp=2 zero=3", "pp=2", "cp=2 zero=2")),
        pytest.param("tp=2 mode=REDUCE_SCATTER", marks=SLOW),
    ],
)
def test_samples_while_training_are_those_of_one_process_and_change_nothing(layout: str, sampled: Any) -> None:
    problem, folder, expected, losses = sampled
    assert len(expected) == 4
    ranks = problem.config(layout, folder).parallelism.world_size
    for messages, found in run_ranks(ranks, sampling_rank, problem, layout, folder):
        assert messages == expected
        assert found == pytest.approx(losses, rel=1e-5)
