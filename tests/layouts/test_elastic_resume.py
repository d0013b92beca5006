"""Saved under one layout, resumed under another: the same run goes on, weights, moments, schedule and data alike.

    one process    step 1 2 │ 3 4 5
    layout A       step 1 2 ╵ saves
    layout B                ╵ loads, saves again at once, trains 3 4 5

What A saved is what the one process saved, to rounding; what B saves right after loading is what A saved, bit by bit;
and the losses of steps 3 to 5 are the one process's.
"""

import json
import logging
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kenotron.checkpoint import folders, manifest
from kenotron.checkpoint.checkpoints import Checkpoints
from kenotron.config import Config, load, refuse_unsupported
from kenotron.config.errors import InputError
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.training.build import build_run
from kenotron.training.checkpoint_hook import save
from kenotron.training.run import Run, close
from kenotron.training.step import train_step
from support.layout_runs import (
    ATTENTION,
    FAMILIES,
    HYBRIDS,
    SAMPLES,
    SHORT,
    SPARSE,
    STATE_SPACES,
    Problem,
    heard,
    prepared,
)
from support.ranks import run_ranks
from support.tiny_run import REPOSITORY, equal_bits, same_saved, saved_weights

SAVED, LAST = 2, 5
VOCABS = (61, 300)  # rows in every file, however many rows tp pads it to
SCHEDULE = """optimizer.learning_rate_scheduler={learning_rate: 0.01, lr_warmup_steps: 3, lr_decay_style: cosine,
    lr_decay_steps: 2, min_decay_lr: 0.001}"""
SMALL_STEPS = SCHEDULE.replace("0.01,", "0.001,").replace("0.001}", "0.0001}")  # norms behind branches amplify rounding
EPSILON = "optimizer.optimizer_factory.adam_eps=1e-5"  # above tiny gradients, which would decide on whole steps
SEVERAL = """optimizer.param_groups=[{pattern: mlp, optimizer_factory: {name: normuon}},
    {pattern: norm, optimizer_factory: {name: sgd}}, {pattern: lm_head, optimizer_factory: {name: RMSprop}}]"""
TEXTS = [str(REPOSITORY / name) for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/parallelism.md")]
STREAM = (
    "tokenizer.train={vocab_size: 300}",
    f"data_stages=[{{name: text, start_training_step: 1, data: {{dataset: {{text_files: {TEXTS}, "
    "streaming: {shuffle_buffer: 5, reader_shards: 4}}}}]",
    EPSILON,  # texts have rare tokens
)
FACTORY = "optimizer.optimizer_factory="


def deep(name: str, *overrides: str, absent: tuple[str, ...] = (), **keys: Any) -> Problem:
    return Problem(name, overrides, LAST, {"num_hidden_layers": 8} | keys, absent)  # two stages on each of four ranks


def hybrid(name: str, hybrid_override_pattern: str, **keys: Any) -> Problem:
    return deep(name, SMALL_STEPS, EPSILON, hybrid_override_pattern=2 * hybrid_override_pattern, **keys)


PROBLEMS = {
    problem.name: problem
    for problem in (
        deep("plain", SCHEDULE),
        deep("tied", SCHEDULE, tie_word_embeddings=True, num_key_value_heads=2),
        *(deep(name, SCHEDULE, f"{FACTORY}{{name: {name}}}") for name in ("muon", "normuon", "soap")),
        deep("muon_of_experts", SMALL_STEPS, FACTORY + "{name: muon, adam_eps: 1.0e-5}", **SPARSE["mixtral"]),
        deep("several", SMALL_STEPS, "optimizer.ema_decay=0.9", SEVERAL),
        deep("sgd", SCHEDULE, FACTORY + "{name: sgd, momentum: 0.9}", attention_bias=True),
        deep("streamed", SCHEDULE, *STREAM, vocab_size=300, eos_token_id=0),
        # GPT-NeoX: biases of keys have no gradient in channels without positions, only its rounding.
        *(deep(name, SMALL_STEPS, EPSILON, **keys) for name, keys in (FAMILIES | SPARSE).items()),
        *(deep(name, SMALL_STEPS, EPSILON, absent=ATTENTION, **keys) for name, keys in STATE_SPACES.items()),
        *(hybrid(name, **keys) for name, keys in HYBRIDS.items()),
    )
}
Numbers = list[tuple[float, float, float]]  # lm_loss, grad_norm, learning_rate of some steps


def config_of(problem: str, layout: str, checkpoints: Path) -> Config:
    config = PROBLEMS[problem].config(layout, checkpoints.parent)
    refuse_unsupported(config)
    return _into(config, checkpoints)


def _into(config: Config, checkpoints: Path) -> Config:
    return load(config, [f"checkpoints.checkpoints_path={checkpoints}"])


def steps_until(run: Run, last: int) -> Numbers:
    numbers = []
    while run.step < last:
        result = train_step(run, run.data.batch(run.step + 1, run.mesh.rank("batch"), run.mesh.degree("batch")))
        run.step += 1
        numbers.append((result.lm_loss, result.grad_norm, result.learning_rate))
    return numbers


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have: threads of a busy machine wait for one another longer than these matrices take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def begin(rank: int, problem: str, layout: str, checkpoints: Path, last: int = SAVED) -> Numbers:
    """Train from step 1, save at step 2, and go on to `last`."""
    config = config_of(problem, layout, checkpoints)
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    with prepared(config, mesh) as run:
        steps_until(run, SAVED)
        save(run)
        return steps_until(run, last)


def go_on(rank: int, problem: str, layout: str, checkpoints: Path, again: Path) -> Numbers:
    """Resume as `train` does, save into `again` at once, and train to the end."""
    config = config_of(problem, layout, checkpoints)
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    start = Checkpoints(config).start()
    assert (start.continues, start.step) == (True, SAVED)
    checkpoints = Checkpoints(_into(config, again))
    run = build_run(config, mesh, torch.device("cpu"), start, checkpoints=checkpoints)
    try:
        assert run.step == SAVED
        run.config = checkpoints.config
        save(run)
        return steps_until(run, LAST)
    finally:
        close(run)


def on_ranks(world_size: int, work: Any, *args: Any) -> list[Any]:
    return [work(0, *args)] if world_size == 1 else run_ranks(world_size, work, *args)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Numbers]]:
    """Of a problem, the folder of one process's checkpoint of step 2, and its numbers of steps 3 to 5."""

    @cache
    def train(problem: str) -> tuple[Path, Numbers]:
        folder = tmp_path_factory.mktemp(problem) / "checkpoints"
        return folder / str(SAVED), begin(0, problem, "", folder, LAST)

    return train


def expect_the_same_run(problem: str, a: str, b: str, folder: Path, alone: tuple[Path, Numbers]) -> None:
    """Save under `a`, resume under `b`, and compare with one process."""
    path, numbers = alone
    (one, first), (other, second) = ((layout, ranks_of(problem, layout)) for layout in (a, b))
    on_ranks(first, begin, problem, one, folder / "a")
    expect_the_files_of_one_process(folder / "a" / str(SAVED), path)
    results = on_ranks(second, go_on, problem, other, folder / "a", folder / "b")
    expect_the_same_bits(folder)
    for found in results:
        for (loss, norm, rate), (loss0, norm0, rate0) in zip(found, numbers, strict=True):
            assert loss == pytest.approx(loss0, rel=1e-5)
            assert norm == pytest.approx(norm0, rel=1e-4)
            assert rate == rate0


def expect_the_same_bits(folder: Path) -> None:
    """What was saved at once after loading is what was loaded."""
    for part in ("model", "optimizer"):
        saved, again = (saved_weights(folder / root / str(SAVED), part) for root in ("a", "b"))
        assert equal_bits(saved, again), part


def expect_the_files_of_one_process(path: Path, alone: Path) -> None:
    assert folders.verify(path) == []
    assert manifest.read_manifest(path).state == manifest.read_manifest(alone).state
    for part in ("model", "optimizer"):
        found, expected = saved_weights(path, part), saved_weights(alone, part)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].shape == tensor.shape, name
            assert found[name].dtype == tensor.dtype, name
            distance = (found[name].double() - tensor.double()).norm()
            assert distance <= 1e-4 * tensor.double().norm(), name  # Adam turns rounding of tiny gradients into steps
        assert_written_once(path / part, expected)
    assert saved_weights(path)["model.embed_tokens.weight"].shape[0] in VOCABS


def assert_written_once(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    entries = json.loads((folder / "index.json").read_text())["tensors"].values()
    chunks = [chunk for entry in entries for chunk in entry["chunks"]]
    assert sum(math.prod(chunk["shape"]) for chunk in chunks) == sum(tensor.numel() for tensor in tensors.values())


def ranks_of(problem: str, layout: str) -> int:
    return config_of(problem, layout, Path("nowhere")).parallelism.world_size


PAIRS = [
    ("tied", "tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b"),
    ("muon", "dp=2 zero=3", "dp=2 zero=0"),
    ("normuon", "dp=2 zero=1", "tp=2"),  # Megatron-LM #6920 went on from another model
    ("muon_of_experts", "dp=2 ep=2 zero=1", "tp=2"),
    ("several", "dp=2 zero=2", "pp=2 engine=1f1b"),
    ("sgd", "dp=2 zero=3 cp=2", "pp=2 engine=interleaved_1f1b accum=4"),
    ("streamed", "dp=2 zero=1", "dp=4 zero=2"),
]
MORE_PAIRS = [
    ("tied", "pp=2 engine=1f1b", "tp=2 mode=REDUCE_SCATTER"),
    ("plain", "tp=4", "dp=4 shard=2 zero=hybrid"),
    ("plain", "", "dp=2 zero=3"),
    ("plain", "dp=2 zero=1", ""),
    ("tied", "tp=2", "dp=2 zero=2"),
    ("tied", "dp=2 zero=3 tp=2", "pp=4 engine=1f1b accum=4"),
    ("muon", "tp=2 pp=2 engine=1f1b", "dp=2 zero=2 tp=2 mode=REDUCE_SCATTER"),
    ("normuon", "tp=2 pp=2 engine=1f1b", "dp=4 shard=2 zero=hybrid"),
    ("muon_of_experts", "dp=4 ep=4 zero=3", "dp=2 ep=2 tp=2"),
    ("muon_of_experts", "pp=2 engine=1f1b dp=2 ep=2", "dp=2 zero=2"),
    ("muon_of_experts", "dp=8 zero=3", "dp=4 tp=2 ep=2 zero=1"),  # cut inside the experts
    ("several", "tp=2 pp=2 engine=1f1b", "dp=2 zero=3"),
    ("sgd", "dp=2 zero=3 cp=2", "tp=4 mode=REDUCE_SCATTER"),
    ("tied", "dp=2 zero=3 tp=2 mode=REDUCE_SCATTER pp=2 engine=1f1b", "dp=4 shard=2 zero=1 tp=2"),
    ("streamed", "dp=4 tp=2", "pp=2 engine=1f1b"),
    ("plain", "tp=8", "pp=2 engine=zbv_zero_bubble accum=4 dp=2 zero=2 cp=2"),
    *(
        (family, "dp=2 zero=1 tp=2", "tp=2 mode=REDUCE_SCATTER pp=2 engine=1f1b accum=4")
        for family in FAMILIES | STATE_SPACES | HYBRIDS
    ),
    ("nemotron_h", "cp=2 method=ulysses dp=2 zero=3", "pp=4 engine=1f1b accum=4"),
    ("nemotron_h_of_experts", "dp=2 ep=2 zero=3", "pp=2 engine=1f1b"),
    ("qwen2_moe", "dp=4 ep=4 zero=1", "dp=2 ep=2 tp=2 mode=REDUCE_SCATTER"),
    ("olmoe", "dp=2 tp=2 ep=2 zero=3", "pp=2 engine=1f1b accum=4"),
    ("mixtral", "pp=2 engine=1f1b dp=2 ep=2", "dp=4 ep=2 zero=3"),
    ("qwen3_moe", "", "cp=2 dp=2 ep=4 zero=2"),
    ("deepseek_v3", "dp=2 ep=2 zero=2 tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b dp=2 zero=3"),
]


@pytest.mark.cases(2)
@pytest.mark.budget(12, reason="two runs of up to four ranks each, and two checkpoints")
@pytest.mark.parametrize(
    ("problem", "a", "b"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS)],
    ids=[f"{a or 'alone'} to {b or 'alone'} ({problem})" for problem, a, b in (*PAIRS, *MORE_PAIRS)],
)
def test_a_run_saved_under_one_layout_goes_on_under_another(problem, a, b, alone, tmp_path):
    expect_the_same_run(problem, a, b, tmp_path, alone(problem))


@pytest.mark.slow
def test_the_masters_of_a_bf16_run_travel_in_fp32(tmp_path: Path) -> None:
    run_ranks(4, begin, "tied", "dp=2 zero=3 tp=2 model.dtype=bfloat16", tmp_path / "a")
    run_ranks(4, go_on, "tied", "pp=2 engine=1f1b cp=2 model.dtype=bfloat16", tmp_path / "a", tmp_path / "b")
    expect_the_same_bits(tmp_path)
    for part in ("model", "optimizer"):
        saved = saved_weights(tmp_path / "a" / str(SAVED), part)
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any((tensor != tensor.bfloat16()).any() for tensor in saved_weights(tmp_path / "a" / str(SAVED)).values())


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), [("dp=2 zero=1", "tp=2"), ("tp=2 pp=2 engine=1f1b", "dp=2 zero=3 tp=2")])
def test_the_state_of_soap_travels(a: str, b: str, tmp_path: Path) -> None:
    """Its runs part: eigenvectors of nearly equal eigenvalues follow the last bit of a gradient."""
    on_ranks(ranks_of("soap", a), begin, "soap", a, tmp_path / "a")
    on_ranks(ranks_of("soap", b), go_on, "soap", b, tmp_path / "a", tmp_path / "b")
    expect_the_same_bits(tmp_path)


CHOICES = yaml.safe_load("""{dp: [1, 2, 4, 8], shard: [null, 1, 2], zero: [0, 1, 2, 3, hybrid], tp: [1, 2, 4, 8],
    mode: [ALL_REDUCE, REDUCE_SCATTER], pp: [1, 2, 4],
    engine: [afab, 1f1b, interleaved_1f1b, interleaved_zero_bubble, zbv_zero_bubble, dualpipev],
    cp: [1, 2, 4], method: [ring, ulysses, allgather], accum: [1, 2, 4]}""")


def random_layout(numbers: random.Random, problem: str = "plain") -> str:
    """A layout of at most 8 ranks that the problem's config takes, every key drawn by itself."""
    while True:
        drawn = {name: numbers.choice(values) for name, values in CHOICES.items()}
        layout = " ".join(f"{name}={value}" for name, value in drawn.items() if value is not None)
        if math.prod(drawn[axis] for axis in ("dp", "tp", "pp", "cp")) > 8 or SAMPLES % (drawn["dp"] * drawn["accum"]):
            continue
        try:
            ranks_of(problem, layout)
        except InputError:
            continue
        return layout


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_pair_of_layouts_will_do(seed: int, alone: Callable[[str], tuple[Path, Numbers]], tmp_path: Path) -> None:
    numbers = random.Random(seed)
    problem = numbers.choice(sorted(PROBLEMS.keys() - {"soap"}))
    a, b = random_layout(numbers, problem), random_layout(numbers, problem)
    try:
        expect_the_same_run(problem, a, b, tmp_path, alone(problem))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {problem}, {a} to {b}") from error


def test_random_layouts_use_every_axis() -> None:
    drawn = [random_layout(random.Random(seed)).split() for seed in range(60)]
    for name in ("dp", "tp", "pp", "cp", "zero"):
        values = {part for layout in drawn for part in layout if part.startswith(f"{name}=")}
        assert len(values) >= 3, name
    assert SHORT.keys() >= CHOICES.keys()


EIGHT = "dp=2 zero=3 tp=2 mode=REDUCE_SCATTER pp=2 engine=1f1b"


def start_from(rank: int, problem: str, layout: str, path: Path, checkpoints: Path, interleaved: bool) -> None:
    """Save at step 0 what `init_method: {path}` gives."""
    more = (f"model.init_method={{path: {path}}}", f"model.model_config.rope_interleaved={str(interleaved).lower()}")
    given = PROBLEMS[problem]
    config = replace(given, overrides=(*given.overrides, *more)).config(layout, checkpoints.parent)
    config = _into(config, checkpoints)
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    with prepared(config, mesh) as run:
        assert run.step == 0
        save(run)


@pytest.mark.parametrize(
    "layout",
    [
        *("tp=2 pp=2 engine=1f1b", "dp=4 shard=2 zero=hybrid"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp=4", "dp=2 zero=3 tp=2")),
    ],
)
def test_initial_weights_of_a_checkpoint_are_its_bits_on_every_layout(layout, alone, tmp_path):
    path, _ = alone("tied")
    run_ranks(4, start_from, "tied", layout, path, tmp_path / "same", False)
    assert same_saved(tmp_path / "same" / "0", path)


def test_initial_weights_change_the_order_of_their_channels_in_blocks(alone, tmp_path):
    path, _ = alone("plain")
    start_from(0, "plain", "", path, tmp_path / "one", True)
    run_ranks(4, start_from, "plain", "dp=2 zero=3 tp=2", path, tmp_path / "four", True)  # blocks of 2 rows, heads of 4
    one, four = (tmp_path / name / "0" for name in ("one", "four"))
    assert same_saved(one, four)
    assert not same_saved(one, path)


@pytest.fixture(scope="module")
def of_eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight") / "checkpoints"
    run_ranks(8, begin, "tied", EIGHT, folder)
    return folder / str(SAVED)


@pytest.mark.slow
def test_every_rank_of_eight_writes_about_as_much(of_eight_ranks: Path) -> None:
    for part in ("model", "optimizer"):
        sizes = [path.stat().st_size for path in (of_eight_ranks / part).glob("rank*.safetensors")]
        assert len(sizes) == 8
        assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.slow
def test_the_tools_of_one_process_read_what_eight_ranks_saved(of_eight_ranks, alone, tmp_path, nursery):
    def tool(*words: str | Path) -> str:
        found = nursery.run(*words, folder=tmp_path)
        assert found.code == 0, found.stderr
        return found.stdout

    assert "is intact" in tool("checkpoint", "verify", of_eight_ranks)
    shown = tool("checkpoint", "show", of_eight_ranks)
    assert f"[{VOCABS[0]}, 32]" in shown
    tool("convert", "to-hf", of_eight_ranks, tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert equal_bits({name: exported[name] for name in saved_weights(of_eight_ranks)}, saved_weights(of_eight_ranks))
    prompt = ("--prompt-tokens", "1,2,3", "--max-new-tokens", "8", "--temperature", "0")
    assert tool("generate", of_eight_ranks, *prompt) == tool("generate", alone("tied")[0], *prompt)


def say_once(rank: int, layout: str, checkpoints: Path, fresh: bool) -> tuple[int | None, str, list[str]]:
    """Where a start begins, the run's name, and the warnings that this rank gave."""
    config = config_of("plain", layout, checkpoints)
    checkpoints = Checkpoints(load(config, ["general.run=another"]), fresh=fresh)
    with heard(logging.WARNING) as lines, checkpoints.held():
        start = checkpoints.start()
        if fresh:
            checkpoints.set_aside()
    return start.step if start.continues else None, start.name, lines


def test_ranks_start_at_one_place_and_rank_0_alone_speaks_and_tidies(alone, tmp_path):
    root = tmp_path / "checkpoints"
    shutil.copytree(alone("plain")[0], root / str(SAVED))
    shutil.copytree(root / str(SAVED), root / "4")  # renamed, so not whole
    (root / "3.tmp-0123abcd").mkdir()
    for fresh, step in ((False, SAVED), (True, None)):
        found = run_ranks(2, say_once, "tp=2", root, fresh)
        assert [(where, name) for where, name, _ in found] == [(step, "another" if fresh else "tiny")] * 2
        assert found[0][2]
        assert found[1][2] == []
    assert sorted(path.name for path in root.glob("replaced-*/*")) == ["2", "4"]
    assert not list(root.glob("*.tmp-*"))
