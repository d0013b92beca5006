"""Optimizers of matrices move shards of every kind as one process moves the whole, each by one rank."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from kenotron.optim import matrices as of_matrices
from kenotron.optim import muon
from kenotron.optim.matrices import whole_here
from kenotron.optim.matrix_owners import in_rounds
from kenotron.optim.muon import Muon, NorMuon
from kenotron.optim.soap import Soap
from kenotron.optim.state import init_state
from kenotron.parallel.mesh import build_mesh
from kenotron.parallel.ranks import balance
from kenotron.parallel.shards import shard_of
from support.ranks import run_ranks

SHAPES = [(24, 16), (16, 24), (6, 16), (24, 16), (3, 8), (50, 4), (4, 6, 8)]  # the last one: experts
OPTIMIZERS = {"muon": Muon, "normuon": NorMuon, "soap": partial(Soap, precondition_frequency=2)}
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
                cut = Replicate() if number == 4 else Shard(1 if len(shape) == 3 else number % 2)
                local = matrix if number == 4 else matrix.chunk(2, cut.dim)[tp_mesh.get_local_rank()].clone()
                matrix = DTensor.from_local(local, tp_mesh, [cut], run_check=False)
            self.register_parameter(f"matrix{number}", nn.Parameter(matrix))


Blocks = list[tuple[tuple[int, ...], Tensor]]


def steps(matrices: Matrices, name: str, dtype: torch.dtype, batch_elements: int) -> Blocks:
    """(offset, block) of every matrix after some steps, as this rank holds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "matmul_dtype", lambda device, wanted: dtype)
        patch.setattr(of_matrices, "BATCH_ELEMENTS", batch_elements)
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in matrices.parameters():
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups = [{"params": some} for some in by_mesh.values()]
        optimizer = OPTIMIZERS[name](groups, lr=0.1, weight_decay=0.1)
        init_state(optimizer)
        for step in range(STEPS):
            for number, parameter in enumerate(matrices.parameters()):
                shard = shard_of(parameter.detach())
                part = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape, strict=True))
                gradient = random(shard.shape, 100 * step + number)[part].clone()
                if isinstance(parameter, DTensor):
                    whole = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
                    gradient = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements, **whole)
                parameter.grad = gradient
            optimizer.step()
    shards = [shard_of(parameter.detach()) for parameter in matrices.parameters()]
    return [(shard.offset, shard.tensor.clone()) for shard in shards]


def rank_steps(rank: int, degrees: dict[str, int], name: str, dtype: torch.dtype, batch_elements: int) -> Blocks:
    mesh = build_mesh(degrees, torch.distributed.get_world_size(), "cpu").device_mesh
    matrices = Matrices(mesh["tp"] if "tp" in degrees else None)
    data_axes = tuple(axis for axis in degrees if axis != "tp")
    if data_axes:
        fully_shard(matrices, mesh=mesh[data_axes])
    return steps(matrices, name, dtype, batch_elements)


@pytest.mark.cases(10)
@pytest.mark.parametrize("batch_elements", [2**22, 200], ids=["one round", "many rounds"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("muon", torch.float32), ("muon", torch.bfloat16), ("normuon", torch.float32), ("soap", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(
    "degrees",
    [{"dp_shard": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}],
    ids=str,
)
def test_shards_move_as_the_whole_matrix(degrees, name, dtype, batch_elements):
    ranks = torch.tensor(list(degrees.values())).prod().item()
    expected = [block for _, block in steps(Matrices(), name, dtype, 1)]  # matrix by matrix
    for blocks in run_ranks(int(ranks), rank_steps, degrees, name, dtype, batch_elements):
        for whole, (offset, block) in zip(expected, blocks, strict=True):
            part = tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))
            torch.testing.assert_close(block, whole[part], rtol=0, atol=0)


def experts_in_place(rank: int) -> tuple[bool, bool]:
    mesh = build_mesh({"dp_shard": 2}, 2, "cpu").device_mesh
    cuts = [Shard(0), Shard(1)]
    experts = [DTensor.from_local(torch.zeros(2, 4, 4), mesh["dp_shard"], [cut], run_check=False) for cut in cuts]
    return whole_here(experts[0]), whole_here(experts[1])


def test_experts_that_a_rank_has_whole_do_not_travel() -> None:
    assert run_ranks(2, experts_in_place) == [(True, False)] * 2


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
