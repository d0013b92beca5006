"""`checkpoints.local`: a run that is killed goes on from its newest checkpoint, be it on the machine's own disk.

Which one that is, is the question of most tests: never one that is damaged, of another run, or behind a durable one.
"""

import io
import resource
import shutil
import signal
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import kenotron as kn
from kenotron.checkpoint.folders import list_checkpoints, verify
from kenotron.config import InputError, NotSupportedYet
from kenotron.launch.training import train
from kenotron.parallel.mesh import axes, build_mesh
from support.checkpoint_states import flip_a_byte
from support.nursery import Finished, Nursery
from support.ranks import ROUNDING, run_ranks
from support.tiny_run import losses, numbers, same_saved, tiny_config, tiny_yaml, train_and_listen, train_quietly

STEPS = 8


def keys(folder: Path, durable: int = 4, local: int = 1) -> tuple[str, ...]:
    """Overrides: `STEPS` steps, and how many lie between two checkpoints of each kind."""
    where = f"checkpoints.local={{path: {folder}/shm, interval: {local}}}"
    return (f"tokens.train_steps={STEPS}", f"checkpoints.checkpoint_interval={durable}", where)


def config(folder: Path, *more: str, durable: int = 4, local: int = 1) -> Any:
    return tiny_config(folder, *keys(folder, durable, local), *more)


def on_rank(what: str, step: int, rank: int = 0, more: str = "") -> str:
    """The override that makes a rank fail in a step, before the checkpoint of that step."""
    kwargs = f"{{what: {what}, rank: {rank}, step: {step}{more}}}"
    return f"general.hooks=[{{path: support.user_parts.OnRank, kwargs: {kwargs}}}]"


def fail(folder: Path, step: int, *more: str, **intervals: int) -> None:
    """A run that ends by an error in `step`."""
    with pytest.raises(RuntimeError, match="this hook is broken"):
        train_quietly(config(folder, on_rank("raise", step), *more, **intervals))


def local_steps(folder: Path) -> list[int]:
    return [entry.step for root in (folder / "shm").glob("run-*") for entry in list_checkpoints(root)]


def durable_steps(folder: Path) -> list[int]:
    return [entry.step for entry in list_checkpoints(folder / "checkpoints")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without faults and without local checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    train_quietly(tiny_config(folder, f"tokens.train_steps={STEPS}"))
    return folder


def same_run(folder: Path, whole: Path) -> None:
    assert numbers(folder) == numbers(whole)
    for part in ("model", "optimizer"):
        assert same_saved(folder / "checkpoints" / str(STEPS), whole / "checkpoints" / str(STEPS), part)


def goes_on(folder: Path, first: int, whole: Path, *more: str, **intervals: int) -> str:
    """What the run said that goes on with step `first` and ends as one without faults."""
    _, said = train_and_listen(config(folder, *more, **intervals))
    assert f"Training from step {first} to" in said
    same_run(folder, whole)
    return said


# ---- where a run goes on -----------------------------------------------------------------------------------


def test_a_run_that_failed_goes_on_from_the_local_checkpoint_of_the_step_before(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path, 3, durable=1000)  # there is no durable one yet
    assert (local_steps(tmp_path), durable_steps(tmp_path)) == ([2], [])
    fail(tmp_path, 7)
    assert (local_steps(tmp_path), durable_steps(tmp_path)) == ([6], [4])
    assert (tmp_path / "checkpoints" / "latest.txt").read_text() == "4"
    goes_on(tmp_path, 7, whole)
    assert durable_steps(tmp_path) == [4, 8]
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.slow
def test_hooks_uploads_and_retention_see_durable_checkpoints_alone(tmp_path: Path) -> None:
    recorder = "general.hooks=[support.user_parts.Recorder]"
    run: Any = train_quietly(config(tmp_path, recorder, "checkpoints.keep_last=2", durable=3))
    (hook,) = [hook for hook in run.hooks if hasattr(hook, "moments")]
    saves = [moment for moment in hook.moments if moment.startswith("on_save")]
    assert saves == ["on_save 3", "on_save 6", "on_save 8"]
    assert durable_steps(tmp_path) == [6, 8]


def test_the_newest_local_checkpoint_is_kept_until_a_durable_one_is_newer(tmp_path: Path) -> None:
    seen = f"general.hooks=[{{path: {__name__}.Looks, kwargs: {{folder: {tmp_path}}}}}]"
    run: Any = train_quietly(config(tmp_path, seen, local=1, durable=4))
    (hook,) = [hook for hook in run.hooks if isinstance(hook, Looks)]
    assert hook.seen == [[1], [2], [3], [], [5], [6], [7], []]  # the last step is saved at the end
    assert "is finished" in train_and_listen(config(tmp_path, local=1, durable=4))[1]
    assert [*(tmp_path / "shm").iterdir()] == []


class Looks(kn.Hook):
    """After every step's checkpoint: the local ones."""

    priority = -100

    def __init__(self, folder: str) -> None:
        self.folder, self.seen = Path(folder), list[list[int]]()

    def after_step(self, run: Any, result: Any) -> None:
        self.seen.append([] if run.finished else local_steps(self.folder))


@pytest.mark.parametrize(
    ("damaged", "first"), [("shm/run-*/6", 5), pytest.param("checkpoints/4", 7, marks=pytest.mark.slow)]
)
def test_a_damaged_checkpoint_is_named_and_passed_over(damaged: str, first: int, tmp_path: Path, whole: Path) -> None:
    fail(tmp_path, 7)
    victim = flip_a_byte(next(tmp_path.glob(f"{damaged}/model/rank0.safetensors")))
    assert f"warning: skipping checkpoint {damaged[-1]}: {victim} is damaged" in goes_on(tmp_path, first, whole)


def test_a_local_checkpoint_behind_the_durable_one_does_not_count(tmp_path: Path, whole: Path, monkeypatch: Any):
    """A kill between the end of a durable save and the removal of the local checkpoint."""
    monkeypatch.setattr("kenotron.checkpoint.local.LocalTier.remove", lambda self: None)
    fail(tmp_path, 6, local=3)
    assert (local_steps(tmp_path), durable_steps(tmp_path)) == ([3], [4])
    monkeypatch.undo()
    fail(tmp_path, 6, on_rank("raise", 5), local=3)
    assert local_steps(tmp_path) == []  # it is not kept either
    goes_on(tmp_path, 5, whole, local=3)


def test_a_folder_of_checkpoints_that_was_removed_begins_another_run(tmp_path: Path, whole: Path) -> None:
    """The local checkpoint would fit in everything: the same YAML, a step ahead of all durable ones."""
    fail(tmp_path, 3, "general.seed=8")
    assert local_steps(tmp_path) == [2]
    shutil.rmtree(tmp_path / "checkpoints")
    goes_on(tmp_path, 1, whole)


def test_who_removes_the_newest_durable_checkpoints_goes_back(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path, 6, durable=2, local=1)
    fail(tmp_path, 6, durable=2, local=1)
    assert (local_steps(tmp_path), durable_steps(tmp_path)) == ([5], [2, 4])
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    said = goes_on(tmp_path, 3, whole, durable=2)
    assert f"it follows checkpoint 4, which is not in {tmp_path}/checkpoints" in said


def test_fresh_removes_local_checkpoints(tmp_path: Path, whole: Path) -> None:
    fail(tmp_path, 7, "general.seed=8")
    _, said = train_and_listen(config(tmp_path), fresh=True)
    assert "--fresh: the local checkpoints in " in said
    assert "Training from step 1 to" in said
    same_run(tmp_path, whole)
    train_quietly(config(tmp_path), fresh=True)
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_run_that_is_stopped_at_its_local_checkpoint_saves_a_durable_one(tmp_path: Path) -> None:
    fail(tmp_path, 3)
    train_quietly(config(tmp_path, f"general.hooks=[{__name__}.StopsAtOnce]"))
    assert (local_steps(tmp_path), durable_steps(tmp_path)) == ([], [2])


class StopsAtOnce(kn.Hook):
    """Asks the run to stop before its first step."""

    def on_train_start(self, run: Any) -> None:
        run.stop("enough")


@pytest.mark.slow
@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("steps", [6, 7])
def test_a_run_that_is_shortened_to_its_local_checkpoint_or_less_ends_there(steps: int, tmp_path: Path) -> None:
    fail(tmp_path, 8)
    _, said = train_and_listen(config(tmp_path, f"tokens.train_steps={steps}"))
    assert f"7: the run ends at step {steps}" in said
    assert durable_steps(tmp_path) == [4, steps]


# ---- faults of the local folder ----------------------------------------------------------------------------


class LittleRoomAt(kn.Hook):
    """In some steps no file of this process, or of the one that writes, grows beyond 20 kB: a full local folder."""

    priority = -40

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def after_step(self, run: Any, result: Any) -> None:
        writer = getattr(run.checkpoints.engine, "writer", None)
        while not run.checkpoints.engine.settled():
            pass
        most = 20_000 if run.step in self.steps else resource.RLIM_INFINITY
        resource.prlimit(writer.process.pid if writer else 0, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


@pytest.mark.parametrize("engine", ["torch", pytest.param("datastates", marks=pytest.mark.slow)])
def test_a_full_local_folder_is_a_warning_and_training_goes_on(engine: str, tmp_path: Path, whole: Path) -> None:
    room = f"general.hooks=[{{path: {__name__}.LittleRoomAt, kwargs: {{steps: [2, 6]}}}}]"
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        _, said = train_and_listen(config(tmp_path, room, f"checkpoints.checkpointing_engine={engine}"))
    finally:
        signal.signal(signal.SIGXFSZ, before)
        resource.prlimit(0, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # Of the step that was to be saved, or of the checkpoint, if the writer says so later.
    warnings = [line for line in said.splitlines() if line.startswith("warning: ") and "cannot write" in line]
    assert len(warnings) == 2, said
    assert all(f"cannot write {tmp_path}/shm/run-" in line and "File too large" in line for line in warnings)
    same_run(tmp_path, whole)
    assert durable_steps(tmp_path) == [4, 8]


def test_a_local_folder_that_cannot_be_made_is_said_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "shm").write_text("not a folder")
    with pytest.raises(InputError, match=rf"checkpoints.local.path: cannot create {tmp_path}/shm/run-.*: "):
        train_quietly(config(tmp_path))


@pytest.mark.parametrize(
    ("path", "interval", "message"),
    [
        ("{here}/checkpoints/local", 1, r"local.path: expected a folder outside of .*/checkpoints, found "),
        ("{here}/shm", 4, r"local.interval: expected less than checkpoint_interval 4, found 4"),
        ("s3://bucket/run", 1, r"local.path: s3://bucket/run: expected a local path"),
    ],
)
def test_what_makes_no_sense_is_refused(path: str, interval: int, message: str, tmp_path: Path) -> None:
    where = f"checkpoints.local={{path: '{path.format(here=tmp_path)}', interval: {interval}}}"
    with pytest.raises((InputError, NotSupportedYet), match=message):
        tiny_config(tmp_path, "checkpoints.checkpoint_interval=4", where)


# ---- ranks -------------------------------------------------------------------------------------------------

TWO_RANKS = ("parallelism.dp=2", "tokens.micro_batch_size=2", "optimizer.zero_stage=1")


def train_on_rank(rank: int, folder: Path, fails: bool) -> str:
    """One of two ranks; what it said."""
    made = config(folder, *TWO_RANKS, *([f"general.hooks=[{__name__}.AllFail]"] if fails else []))
    expected: Any = pytest.raises(RuntimeError, match="all fail") if fails else nullcontext()
    with redirect_stdout(said := io.StringIO()), expected:
        train(made, build_mesh(axes(made), 2, "cpu"), torch.device("cpu"))
    return said.getvalue()


class AllFail(kn.Hook):
    """In step 7 every rank raises an error."""

    def after_step(self, run: Any, result: Any) -> None:
        if run.step == 7:
            raise RuntimeError("all fail")


@pytest.mark.slow
def test_another_layout_goes_on_from_a_local_checkpoint(tmp_path: Path, whole: Path) -> None:
    one_rank = ("optimizer.zero_stage=1",)
    run_ranks(2, train_on_rank, tmp_path / "to one", True)
    assert local_steps(tmp_path / "to one") == [6]
    _, said = train_and_listen(config(tmp_path / "to one", *one_rank))
    assert "Training from step 7 to" in said
    fail(tmp_path / "to two", 7, *one_rank)
    assert "Training from step 7 to" in run_ranks(2, train_on_rank, tmp_path / "to two", False)[0]
    for name in ("to one", "to two"):
        assert losses(tiny_config(tmp_path / name)) == pytest.approx(losses(tiny_config(whole)), rel=ROUNDING)
        assert verify(tmp_path / name / "checkpoints" / "8") == []


# ---- processes that are killed -----------------------------------------------------------------------------

PROCESSES = ("parallelism.dp=2", "tokens.micro_batch_size=2")


@pytest.fixture(scope="module", params=[0, 1], ids=["zero 0", "zero 1"])
def whole_on_two(request: Any, tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> tuple[Path, Any]:
    """A run of two processes without faults, and the overrides of its layout."""
    folder = tmp_path_factory.mktemp("two")
    layout = (*PROCESSES, f"optimizer.zero_stage={request.param}")
    finished = nursery.run("train", tiny_yaml(folder), *layout, f"tokens.train_steps={STEPS}", folder=folder)
    assert finished.code == 0, finished.stderr
    return folder, layout


def begins(finished: Finished) -> list[int]:
    """The first step of every time that training began."""
    lines = [line for line in finished.stdout.splitlines() if line.startswith("Training from step ")]
    return [int(line.split()[3]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "datastates"])
def test_sigkill_between_durable_saves_costs_the_steps_since_the_local_one(
    engine: str, whole_on_two: tuple[Path, Any], nursery: Nursery, tmp_path: Path
) -> None:
    reference, layout = whole_on_two
    hooks = on_rank("SIGKILL", 7, rank=1).removesuffix("]") + ", support.user_parts.WaitsForTheWriter]"
    overrides = (*layout, *keys(tmp_path, durable=1000), f"checkpoints.checkpointing_engine={engine}")
    killed = nursery.run("train", tiny_yaml(tmp_path), *overrides, hooks, folder=tmp_path)
    assert killed.code == 1
    assert durable_steps(tmp_path) == []
    assert len(losses(tiny_config(tmp_path))) >= 6
    finished = nursery.run("train", tiny_yaml(tmp_path), *overrides, folder=tmp_path)
    assert (finished.code, finished.stderr) == (0, "")
    assert begins(finished) == [7]  # of the steps before none is done again
    same_run(tmp_path, reference)
    assert local_steps(tmp_path) == []


@pytest.mark.slow
def test_spares_go_on_from_the_local_checkpoint(whole_on_two: Any, nursery: Nursery, tmp_path: Path) -> None:
    reference, layout = whole_on_two
    fault = on_rank("SIGKILL", 6, rank=1, more=f", once: {tmp_path / 'happened'}")
    overrides = (*layout, *keys(tmp_path, durable=1000), fault, "--spares", "1")
    finished = nursery.run("train", tiny_yaml(tmp_path), *overrides, folder=tmp_path)
    assert finished.code == 0, finished.stderr
    assert begins(finished) == [1, 6]
    same_run(tmp_path, reference)


@pytest.mark.slow
def test_a_run_named_by_date_keeps_its_name_without_a_durable_one(nursery: Nursery, tmp_path: Path) -> None:
    overrides = (*PROCESSES, *keys(tmp_path, durable=1000), "general.run=named_%date")
    killed = nursery.run("train", tiny_yaml(tmp_path), *overrides, on_rank("SIGKILL", 3, rank=1), folder=tmp_path)
    assert killed.code == 1
    time.sleep(1.1)  # the date has seconds
    finished = nursery.run("train", tiny_yaml(tmp_path), *overrides, folder=tmp_path)
    assert finished.code == 0, finished.stderr
    assert begins(finished) == [3]
    assert len(list((tmp_path / "logs").iterdir())) == 1
