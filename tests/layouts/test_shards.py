"""Where a rank's block of a parameter begins: it holds the numbers of its elements, put there by torch itself."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from kenotron.parallel.shards import block_of, shard_of
from support.ranks import run_ranks

SIZES = (0, 1, 2, 3, 5, 8, 9, 12)


def numbered(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def wrong_blocks(tensor: torch.Tensor, whole: torch.Tensor) -> list[str]:
    """Nothing, or what this rank's block of `tensor` is and what stands there in `whole`."""
    shard = shard_of(tensor.detach())
    assert shard.shape == tuple(whole.shape)
    box = tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.tensor.shape))
    same = whole[box].shape == shard.tensor.shape and torch.equal(whole[box], shard.tensor)
    return [] if same else [f"{tuple(whole.shape)} {tensor.placements} at {shard.offset}: {shard.tensor}"]


# tp's cut of the weight, then the mesh of data parallelism beside it: (dp_replicate, dp_shard)
FEW = [*((1, dp, None) for dp in ((1, 2), (2, 1), (1, 4), (2, 2))), (2, (1, 1), 0), (2, (1, 1), 1), (4, (1, 1), 0)]
FEW += [(2, (1, 2), dim) for dim in (0, 1, None)]
ON_EIGHT_RANKS = [(1, (2, 4), None), *((2, (2, 2), dim) for dim in (0, 1, None)), (2, (1, 4), 0)]
ON_EIGHT_RANKS += [(4, (1, 2), 0), (4, (1, 2), 1), (4, (2, 1), 0)]


def blocks_after_fully_shard(rank: int, tp: int, dp: tuple[int, int], dim: int | None, offload: bool) -> list[str]:
    """FSDP2 over a weight that tp has cut by hand, as `parallel.tensor` does; every size, even where none is left."""
    replicate, shard = dp
    names = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
    larger = {name: degree for name, degree in names.items() if degree > 1}
    mesh = init_device_mesh("cpu", tuple(larger.values()), mesh_dim_names=tuple(larger))
    wrong = []
    for rows, columns in itertools.product(SIZES, (3, 4, 8)):
        if dim is not None and (rows, columns)[dim] % tp:
            continue  # parallel.tensor pads or refuses these
        whole = numbered(rows, columns)
        parameter = whole
        if tp > 1:
            place = Replicate() if dim is None else Shard(dim)
            local = whole if dim is None else whole.chunk(tp, dim)[mesh["tp"].get_local_rank()].contiguous()
            parameter = DTensor.from_local(local, mesh["tp"], [place], run_check=False)
        module = nn.Module()
        module.weight = nn.Parameter(parameter)
        if replicate * shard > 1 and rows * columns:
            # a mesh of one axis shards; a second one in front of it holds copies
            dp_mesh = mesh[tuple(name for name in ("dp_replicate", "dp_shard") if name in larger)]
            policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
            fully_shard(module, mesh=dp_mesh, **policy)
        wrong += wrong_blocks(module.weight, whole)
    return wrong


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("tp", "dp", "dim"), [*FEW, *(pytest.param(*cut, marks=pytest.mark.slow) for cut in ON_EIGHT_RANKS)]
)
def test_the_block_of_a_parameter_is_where_it_says_under_fsdp_over_tp(tp, dp, dim):
    ranks = tp * dp[0] * dp[1]
    assert run_ranks(ranks, blocks_after_fully_shard, tp, dp, dim, False) == [[]] * ranks


def test_the_block_of_an_offloaded_parameter_is_where_it_says() -> None:
    assert run_ranks(4, blocks_after_fully_shard, 2, (1, 2), 0, True) == [[]] * 4


PLACEMENTS = {
    (4,): [[Shard(0)], [Shard(1)], [Replicate()]],
    (2, 2): [list(pair) for pair in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)],
}


def blocks_after_distribution(rank: int, mesh_shape: tuple[int, ...]) -> list[str]:
    mesh = init_device_mesh("cpu", mesh_shape)
    wrong = []
    for rows, columns in itertools.product(SIZES, SIZES):
        whole = numbered(rows, columns)
        for placements in PLACEMENTS[mesh_shape]:
            wrong += wrong_blocks(distribute_tensor(whole, mesh, placements), whole)
    return wrong


@pytest.mark.cases(1)
@pytest.mark.parametrize("mesh_shape", PLACEMENTS)
def test_the_block_of_a_distributed_tensor_is_where_it_says(mesh_shape: tuple[int, ...]) -> None:
    assert run_ranks(4, blocks_after_distribution, mesh_shape) == [[]] * 4


def test_blocks_that_are_not_contiguous_or_not_summed_are_refused() -> None:
    with pytest.raises(ValueError, match="no block is contiguous"):
        block_of((8, 2), (2, 2), (0, 0), [_StridedShard(0, split_factor=3), Shard(0)])
    with pytest.raises(ValueError, match="not in blocks"):
        block_of((8, 2), (2,), (0,), [Partial()])
