"""Checkpoint engines on two ranks."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

import kenotron as kn
from kenotron.checkpoint.engines.client import WRITING
from kenotron.checkpoint.folders import list_checkpoints, verify
from kenotron.config.errors import RunFailed
from support.layout_runs import train_here
from support.ranks import run_ranks
from support.tiny_run import equal_bits, exported, losses, same_saved, saved_weights, slow_copies, tiny_config

TWO_RANKS = ("parallelism.dp=2", "tokens.micro_batch_size=2", "optimizer.zero_stage=1")
ASYNC = pytest.param("async", marks=pytest.mark.slow)


def train_on_rank(rank: int, folder: Path, engine: str, *more: str) -> Any:
    """One of two ranks; copies begin late in the step after a save."""
    saves = (f"checkpoints.checkpointing_engine={engine}", "checkpoints.checkpoint_interval=1")
    with pytest.MonkeyPatch.context() as patch:
        slow_copies(patch)
        return train_here(tiny_config(folder, *saves, *TWO_RANKS, *more))


class OfEachRank(kn.Hook):
    """A state that differs from rank to rank, in names and shapes, too, and a tensor that is split over the ranks."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def on_train_start(self, run: Any) -> None:
        self.rank, self.step = run.mesh.rank("world"), run.step
        self.rows = torch.arange(6.0).view(3, 2)
        if run.mesh.world_size == 2:
            self.rows = distribute_tensor(self.rows, run.mesh.device_mesh, [Shard(0)])

    def after_step(self, run: Any, result: Any) -> None:
        self.step = run.step

    def state_dict(self) -> dict[str, Any]:
        count = 10 * self.rank + self.step
        state = {"count": count, "seen": torch.full((3 + self.rank,), count), "rows": self.rows + self.step}
        return state | {f"of rank {self.rank}": torch.tensor(count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class OnRank0(OfEachRank):
    """What only the first rank keeps."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.full((3,), self.step)} if self.rank == 0 else {}


def hook_states_on_rank(rank: int, folder: Path, engine: str) -> list[dict[str, Any]]:
    found = []
    for name in ("OfEachRank", "OnRank0"):
        for steps in (2, 3):
            keys = (f"general.hooks=[{__name__}.{name}]", f"tokens.train_steps={steps}")
            run = train_on_rank(rank, folder / name, engine, *keys)
        (hook,) = [hook for hook in run.hooks if isinstance(hook, OfEachRank)]
        found.append(hook.loaded)
    return found


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=pytest.mark.slow), ASYNC, "datastates"])
def test_the_state_of_a_hook_is_that_of_rank_0_and_whole_on_every_rank(engine: str, tmp_path: Path) -> None:
    expected = {"count": 2, "seen": torch.full((3,), 2), "rows": torch.arange(6.0).view(3, 2) + 2}
    expected |= {"of rank 0": torch.tensor(2)}
    for states in run_ranks(2, hook_states_on_rank, tmp_path, engine):
        for found, wanted in zip(states, (expected, {"seen": expected["seen"]}), strict=True):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(wanted[name])) for name in wanted)
            assert all(type(found[name]) is type(wanted[name]) for name in wanted)
    saved = saved_weights(tmp_path / "OfEachRank" / "checkpoints" / "3", "hooks")
    assert sorted(name.rpartition(".")[2] for name in saved) == ["of rank 0", "rows", "seen"]


class FullDisk(kn.Hook):
    """From the end of step n on the writer of rank 1 cannot make a file longer than `most[n - 1]` bytes; -1: any."""

    priority = -40

    def __init__(self, most: list[int]) -> None:
        self.most = most
        self.saved: list[str] = []

    def after_step(self, run: Any, result: Any) -> None:
        if run.mesh.rank("world") == 1:
            run.checkpoints.engine.writer.wait(lambda: run.checkpoints.engine.writer.state != WRITING)
            limits = (self.most[run.step - 1], resource.RLIM_INFINITY)
            resource.prlimit(run.checkpoints.engine.writer.process.pid, resource.RLIMIT_FSIZE, limits)

    def on_save(self, run: Any, path: Path) -> None:
        self.saved.append(path.name)


def full_on_rank1(rank: int, folder: Path, engine: str) -> tuple[list[str], str]:
    """In the midst of the files at step 2; at step 3 not even the note of the failure finds room. Then at the end."""

    def hook(*most: int) -> str:
        return f"general.hooks=[{{path: {__name__}.FullDisk, kwargs: {{most: {list(most)}}}}}]"

    run = train_on_rank(rank, folder / "amid", engine, "tokens.train_steps=4", hook(-1, 5000, 0, -1))
    (disk,) = [hook for hook in run.hooks if isinstance(hook, FullDisk)]
    with pytest.raises(RunFailed) as failure:
        train_on_rank(rank, folder / "end", engine, "tokens.train_steps=2", hook(-1, 5000))
    return disk.saved, str(failure.value)


@pytest.mark.parametrize("engine", [ASYNC, "datastates"])
def test_a_full_disk_on_one_rank_costs_all_ranks_one_checkpoint_and_no_step(engine: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, full_on_rank1, tmp_path, engine)
    assert first == second
    saved, failure = first
    assert saved == ["1", "4"]
    assert failure.startswith("step 2: rank 1: cannot write ")
    assert "File too large; earlier checkpoints are as they were" in failure
    for name, steps in (("amid", ["1", "4"]), ("end", ["1"])):
        found = list_checkpoints(tmp_path / name / "checkpoints")
        assert [entry.path.name for entry in found] == steps
        assert [problem for entry in found for problem in verify(entry.path)] == []
        assert not list((tmp_path / name / "checkpoints").glob("*.tmp-*"))
    assert len(losses(tiny_config(tmp_path / "amid"))) == 4


ENGINES = {"torch": "false", "async": "false", "datastates": "true"}  # whether it exports


def train_and_export_on_rank(rank: int, folder: Path) -> None:
    for engine, export in ENGINES.items():
        train_on_rank(rank, folder / engine, engine, "tokens.train_steps=2", f"checkpoints.export_hf={export}")


@pytest.mark.slow
def test_each_engine_saves_and_exports_the_tensors_of_the_step(tmp_path: Path) -> None:
    """They change while the copies and exports of the steps before are made; the last save is in flight at the end."""
    run_ranks(2, train_and_export_on_rank, tmp_path)
    for step in ("1", "2"):
        expected, *others = (tmp_path / engine / "checkpoints" / step for engine in ENGINES)
        for path in others:
            assert verify(path) == []
            assert same_saved(path, expected)
            assert same_saved(path, expected, "optimizer")
        assert equal_bits(exported(others[-1] / "hf"), saved_weights(expected))
