"""A model that others wrote means on every layout what it means in one process, whichever it was saved on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from kenotron.config import dump, load
from kenotron.config.errors import InputError, PeerFailed
from kenotron.interop import open_source
from kenotron.launch import training as launch_training
from kenotron.parallel.mesh import axes, build_mesh
from support.foreign_models import ForeignProblem, folder_of
from support.layout_runs import on, train_here, train_on_layout
from support.pages import blocks, in_a_users_folder, read_page, sections
from support.ranks import run_ranks
from support.tiny_run import Shell, losses

PAGE = read_page("primitives.md")
STEPS = 3
ROUNDING = 5e-6
QUICK = [
    *(("gpt2", 2, "dp=2 zero=2"), ("of_the_page", 2, "dp=2 zero=3 recompute=true")),
    *(("gemma3_text", 2, "tp=2"), ("gemma3_text", 2, "dp=2 zero=3 recompute=true compile=true")),
    ("dropout", 2, "dp=2 zero=2 recompute=true accum=4"),
]
LAYOUTS = [
    *on(2, "dp=2", "dp=2 zero=1", "dp=2 zero=2 recompute=true", "dp=2 zero=3"),
    (4, "dp=4 shard=2 zero=hybrid recompute=true accum=4"),
    (1, "recompute=true compile=true accum=4"),
]
NAMES = ("gpt2", "phi3", "gemma3_text", "bloom", "of_the_page")
SPLIT = [(2, "tp=2 recompute=true"), *on(4, "dp=2 zero=3 tp=2", "dp=2 tp=2 compile=true")]


@pytest.fixture(scope="module")
def problem_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ForeignProblem]:
    """A problem by its name: that of the docs page, or a model of transformers."""
    root = tmp_path_factory.mktemp("models")

    def problem(name: str) -> ForeignProblem:
        if name == "of_the_page":
            (text,) = blocks(sections(PAGE)["A module of your own in the trainer"], "yaml")
            model = yaml.safe_load(text)["model"]
            keys = model["model_config"] | {"vocab_size": 61}
            return ForeignProblem(name, steps=STEPS, model=keys, init=model["init_method"])
        which, more = ("gpt2", {"training_dropout": True}) if name == "dropout" else (name, {})
        return ForeignProblem(name, steps=STEPS, model={"hf": str(folder_of(which, root / name))} | more)

    return problem


@pytest.fixture(scope="module", autouse=True)
def in_the_folder_of_a_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with in_a_users_folder(PAGE, tmp_path_factory.mktemp("user")):
        yield


def on_rank(rank: int, problem: ForeignProblem, layout: str, folder: Path, reference: Path):  # type: ignore[no-untyped-def]
    with in_a_users_folder(PAGE, folder / f"rank{rank}"):
        return train_on_layout(rank, problem, layout, folder, reference)


@pytest.mark.cases(2)
@pytest.mark.budget(20, reason="transformers is imported in ranks; two of them compile")
@pytest.mark.parametrize(
    ("name", "world_size", "layout"),
    [
        *QUICK,
        *(pytest.param("gemma3_text", *layout, marks=pytest.mark.slow) for layout in SPLIT),
        *(pytest.param(name, *layout, marks=pytest.mark.slow) for layout in LAYOUTS for name in NAMES),
        *(pytest.param("dropout", *layout, marks=pytest.mark.slow) for layout in LAYOUTS if "compile" not in layout[1]),
    ],
)
def test_a_layout_means_what_one_process_means(name, world_size, layout, problem_of, like_one_process):
    like_one_process(world_size, problem_of(name), layout, ROUNDING, on_rank)


def train_on(rank: int, problem: ForeignProblem, layout: str, folder: Path, steps: int) -> None:
    """One rank of a run that is saved in `folder`, whatever the layout."""
    keys = (f"checkpoints.checkpoints_path={folder}/checkpoints", f"logging.log_dir={folder}/logs")
    train_here(load(problem.config(layout, folder), [*keys, f"tokens.train_steps={steps}"]))


@pytest.mark.budget(20, reason="two runs on two ranks and one alone")
def test_a_run_goes_on_on_another_layout(problem_of: Callable[[str], ForeignProblem], tmp_path: Path) -> None:
    problem = problem_of("gpt2")
    train_on(0, problem, "", tmp_path / "alone", STEPS)
    run_ranks(2, train_on, problem, "dp=2 zero=3", tmp_path / "moved", 2)
    run_ranks(2, train_on, problem, "dp=2 zero=1 recompute=true", tmp_path / "moved", STEPS)
    assert losses_in(tmp_path / "moved", problem) == pytest.approx(losses_in(tmp_path / "alone", problem), rel=1e-5)
    one, other = (open_source(tmp_path / name / "checkpoints").weights for name in ("alone", "moved"))
    assert set(one) == set(other)
    for name in one:
        assert torch.allclose(one[name], other[name], atol=1e-4), name


@pytest.mark.budget(20, reason="a run on two ranks and one alone")
def test_bf16_under_tensor_parallelism_is_that_of_one_process(problem_of, tmp_path):
    """Its backward pass is outside of the autocast in which the code of transformers runs."""
    problem, half = problem_of("gemma3_text"), "model.dtype=bfloat16"
    train_on(0, problem, half, tmp_path / "alone", STEPS)
    run_ranks(2, train_on, problem, f"tp=2 {half}", tmp_path / "split", STEPS)
    assert losses_in(tmp_path / "split", problem) == pytest.approx(losses_in(tmp_path / "alone", problem), rel=3e-3)


def losses_in(folder: Path, problem: ForeignProblem) -> list[float]:
    return losses(load(problem.config("", folder), [f"logging.log_dir={folder}/logs"]))


def refused_on_rank(rank: int, source: Path, folder: Path) -> str:
    """What a rank of tp 2 says of it."""
    config = ForeignProblem("apertus", model={"hf": str(source)}).config("tp=2", folder)
    with pytest.raises((InputError, PeerFailed)) as error:
        launch_training.train(config, build_mesh(axes(config), 2, "cpu"), torch.device("cpu"))
    return str(error.value)


@pytest.mark.budget(20, reason="transformers is imported in ranks")
def test_a_weight_that_transformers_plan_leaves_out_is_refused(tmp_path: Path, shell: Shell) -> None:
    """Apertus' activation, between layers that are split, has weights of its own."""
    shapes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64}
    source = folder_of("apertus", tmp_path, num_hidden_layers=2, **shapes)
    expected = "parallelism.tp: model.layers.0.mlp.act_fn.alpha_p, or what comes of it, is whole"
    first, other = run_ranks(2, refused_on_rank, source, tmp_path)
    assert first.startswith(expected)
    assert other.startswith(f"rank 0: {expected}")
    config = ForeignProblem("apertus", model={"hf": str(source)}).config("tp=2", tmp_path)
    (tmp_path / "two.yaml").write_text(dump(config))
    code, _, stderr = shell("config", "check", tmp_path / "two.yaml")
    assert code == 2
    assert f"error: {expected}" in stderr
