"""A start needs no more memory than what it leaves behind: no rank ever holds what belongs to another."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron.checkpoint.start import Start
from kenotron.config import Config
from kenotron.models import named_parameters
from kenotron.optim.state import init_state
from kenotron.parallel.mesh import Mesh, axes, build_mesh
from kenotron.parallel.shards import shard_of
from kenotron.training.build import build_run
from kenotron.training.checkpoint_hook import save as save_checkpoint
from kenotron.training.run import Run, close
from support.layout_runs import Problem, prepared
from support.ranks import run_ranks

ALLOWED = 1.1  # of what is there in the end

# 22 million parameters: buffers of a few megabytes, which a start may have, are small beside them
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 8192, "num_key_value_heads": 8}
LAYOUTS = ["tp=2", "dp=2 zero=3", "pp=2 engine=1f1b", "dp=2 zero=1 tp=2 mode=REDUCE_SCATTER"]


class Peak(TorchDispatchMode):
    """Bytes of all tensors that are alive, by storage, and the most there were at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on what this rank holds come here next
        result = func(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:  # no view of a mapped file
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "meta":  # as of the tensors with which DTensor works out shapes
            return
        key = storage._cdata
        if key not in self.alive:
            weakref.finalize(storage, self.alive.pop, key, None)
        self.alive[key] = storage.nbytes()
        self.most = max(self.most, sum(self.alive.values()))


def left_behind(run: Run) -> int:
    """Bytes of this rank's weights and optimizer state."""
    tensors = [parameter for _, parameter in named_parameters(*run.parts)]
    tensors += [value for state in run.optimizer.state.values() for value in state.values()]
    storages = [shard_of(tensor.detach()).tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def layout(name: str, folder: Path, *overrides: str) -> tuple[Config, Mesh]:
    problem = Problem("large", (f"checkpoints.checkpoints_path={folder}/checkpoints", *overrides), 10, LARGE)
    config = problem.config(name, folder)
    return config, build_mesh(axes(config), config.parallelism.world_size, "cpu")


def start(rank: int, name: str, folder: Path, *overrides: str) -> tuple[int, int]:
    config, mesh = layout(name, folder, *overrides)
    with Peak() as peak, prepared(config, mesh) as run:
        return peak.most, left_behind(run)


def save(rank: int, name: str, folder: Path) -> None:
    config, mesh = layout(name, folder)
    with prepared(config, mesh) as run:
        init_state(run.optimizer)
        save_checkpoint(run)


def resume(rank: int, name: str, folder: Path) -> tuple[int, int]:
    config, mesh = layout(name, folder)
    at = Start.at(folder / "checkpoints" / "0", continues=True)
    with Peak() as peak:
        run = build_run(config, mesh, torch.device("cpu"), at)
        try:
            return peak.most, left_behind(run)
        finally:
            close(run)


def expect_no_more_than_left_behind(work: Any, whole: int, name: str, folder: Path, *overrides: str) -> None:
    results = run_ranks(4 if "tp=2" in name and "dp=2" in name else 2, work, name, folder, *overrides)
    assert sum(own for _, own in results) >= whole  # the counter and the shards are real
    for most, own in results:
        assert own <= most <= ALLOWED * own, f"{most / 2**20:.1f} MiB at the most, {own / 2**20:.1f} MiB in the end"


PARAMETERS = 2 * 8192 * 512 + 4 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512) + 512


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_building_and_filling_needs_the_memory_of_the_shard(name: str, tmp_path: Path) -> None:
    expect_no_more_than_left_behind(start, 4 * PARAMETERS, name, tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in chunks that are no other layout's."""
    folder = tmp_path_factory.mktemp("large")
    run_ranks(2, save, "dp=2 zero=2", folder)
    return folder


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_needs_the_memory_of_the_shard_and_its_moments(name: str, saved: Path) -> None:
    expect_no_more_than_left_behind(resume, 12 * PARAMETERS, name, saved)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_starting_from_other_weights_needs_the_memory_of_the_shard(name: str, saved: Path) -> None:
    weights = f"model.init_method={{path: {saved}/checkpoints/0}}"
    expect_no_more_than_left_behind(start, 4 * PARAMETERS, name, saved, weights)
