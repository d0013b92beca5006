"""Muon on shards of every kind moves matrices as one process does, and each is worked on by one rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from kenotron.optim import muon
from kenotron.optim.matrix_owners import balance, in_rounds
from kenotron.optim.muon import MuonWithAdamW
from kenotron.optim.state import init_state
from kenotron.parallel.mesh import build_mesh
from kenotron.parallel.shards import shard_of
from support.data_parallel_run import Layout, Record, train
from support.ranks import run_ranks

SHAPES = [(24, 16), (16, 24), (6, 16), (24, 16), (3, 8), (50, 4)]
STEPS = 3


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Matrices(nn.Module):
    """`SHAPES`, whole; or over tp cut by rows, by columns, and not at all."""

    def __init__(self, tp_mesh: Any = None) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            matrix = random(shape, number)
            if tp_mesh is not None:
                cut = Replicate() if number == 4 else Shard(number % 2)
                local = matrix if number == 4 else matrix.chunk(2, number % 2)[tp_mesh.get_local_rank()].clone()
                matrix = DTensor.from_local(local, tp_mesh, [cut], run_check=False)
            self.register_parameter(f"matrix{number}", nn.Parameter(matrix))


def steps(matrices: Matrices, dtype: torch.dtype, batch_elements: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """(offset, block) of every matrix after some steps, as this rank holds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "matmul_dtype", lambda device: dtype)
        patch.setattr(muon, "BATCH_ELEMENTS", batch_elements)
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in matrices.parameters():
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        optimizer = MuonWithAdamW([{"params": some} for some in by_mesh.values()], lr=0.1, weight_decay=0.1)
        init_state(optimizer)
        for step in range(STEPS):
            for number, parameter in enumerate(matrices.parameters()):
                shard = shard_of(parameter.detach())
                part = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True))
                gradient = random(shard.shape, 100 * step + number)[part].clone()
                if isinstance(parameter, DTensor):
                    gradient = DTensor.from_local(
                        gradient,
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                parameter.grad = gradient
            optimizer.step()
    shards = [shard_of(parameter.detach()) for parameter in matrices.parameters()]
    return [(shard.offset, shard.tensor.clone()) for shard in shards]


def rank_steps(
    rank: int, degrees: dict[str, int], dtype: torch.dtype, batch_elements: int
) -> list[tuple[tuple[int, ...], Tensor]]:
    ranks = torch.distributed.get_world_size()
    mesh = build_mesh(degrees, ranks, "cpu").device_mesh
    assert mesh is not None
    matrices = Matrices(mesh["tp"] if "tp" in degrees else None)
    data_axes = tuple(axis for axis in degrees if axis != "tp")
    if data_axes:
        fully_shard(matrices, mesh=mesh[data_axes])
    return steps(matrices, dtype, batch_elements)


@pytest.mark.cases(8)
@pytest.mark.parametrize("batch_elements", [2**22, 200], ids=["one round", "many rounds"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "degrees",
    [
        {"dp_shard": 2},
        {"dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 2},
        {"dp_shard": 2, "tp": 2},
    ],
    ids=str,
)
def test_shards_move_as_the_whole_matrix(degrees: dict[str, int], dtype: torch.dtype, batch_elements: int) -> None:
    ranks = torch.tensor(list(degrees.values())).prod().item()
    expected = [block for _, block in steps(Matrices(), dtype, 1)]  # matrix by matrix
    for blocks in run_ranks(int(ranks), rank_steps, degrees, dtype, batch_elements):
        for whole, (offset, block) in zip(expected, blocks, strict=True):
            part = tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))
            torch.testing.assert_close(block, whole[part], rtol=0, atol=0)


@cache
def alone(micro_batches: int) -> Record:
    return train(0, Layout(micro_batches=micro_batches, optimizer="muon"), 12)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow), 3]
)
@pytest.mark.parametrize("degrees", [(("dp_shard", 2),), (("dp_replicate", 2), ("dp_shard", 2))], ids=str)
def test_a_model_trains_by_muon_as_on_one_process(degrees: tuple[tuple[str, int], ...], stage: int) -> None:
    layout = Layout(degrees, stage, micro_batches=3, optimizer="muon")
    expected = alone(3)
    for found in run_ranks(layout.ranks, train, layout, 12):
        assert found.losses == pytest.approx(expected.losses, rel=1e-3)
        for name, weight in found.weights.items():
            assert (weight - expected.weights[name]).norm() / expected.weights[name].norm() < 1e-3, name


def test_work_is_balanced_by_cost() -> None:
    assert balance([5, 3, 3, 2], 2) == [0, 1, 1, 0]
    load = [0.0] * 3
    costs = [float(1 + i % 7) for i in range(40)]
    for cost, owner in zip(costs, balance(costs, 3), strict=True):
        load[owner] += cost
    assert max(load) - min(load) <= 1


def test_a_round_holds_what_its_owners_have_room_for() -> None:
    assert in_rounds([4, 4, 4, 4, 9, 1], [0, 1, 0, 1, 0, 1], 8) == [[0, 1, 2, 3], [4, 5]]
    assert in_rounds([9, 1, 1], [0, 0, 0], 4) == [[0], [1, 2]]
