"""Compute which block of a global tensor a DTensor holds on this rank.

If two ranks share an [8, 4] matrix by rows, rank 1 holds the [4, 4] block at offset (4, 0). If tp splits the rows
first, and data parallelism then splits tp's blocks, over dp 2 x tp 2:

    rows   0 1 │ 2 3 ║ 4 5 │ 6 7        (dp 0, tp 0) │ (dp 1, tp 0) ║ (dp 0, tp 1) │ (dp 1, tp 1)

The mesh has dp before tp, so torch marks dp's split as made after tp's: `_StridedShard(0, split_factor=2)`, where 2 is
the number of existing blocks. Blocks have the sizes of `torch.chunk`: 5 rows over 4 ranks make 2, 2, 1 and 0.

Torch's own computation is private and makes a list of every row.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor

from kenotron.kernels.tensor_shard import TensorShard


def shard_of(tensor: Tensor) -> TensorShard:
    """Return the local block of `tensor`, sharing its memory; for a plain tensor, all of it."""
    if not hasattr(tensor, "placements"):  # isinstance would import DTensor, which takes a second
        return TensorShard.full(tensor)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    shape = tuple(tensor.shape)
    offset, block = block_of(shape, mesh.shape, mesh.get_coordinate(), tensor.placements)
    local: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    assert tuple(local.shape) == block, f"a block of {tuple(local.shape)} where {tensor.placements} make it {block}"
    return TensorShard(local, shape, offset)


def local_tensor(tensor: Any) -> Tensor:
    """Return this rank's shard of `tensor`, sharing its memory; a plain tensor is returned itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def block_of(
    shape: Sequence[int], degrees: Sequence[int], place: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offset, shape) of a tensor's block on the rank at coordinate `place` in a mesh of `degrees`."""
    begin, size = [0] * len(shape), list(shape)
    for axis in _in_order_of_cutting(degrees, placements):
        dim = placements[axis].dim
        step = -(-size[dim] // degrees[axis])
        first = min(place[axis] * step, size[dim])
        begin[dim], size[dim] = begin[dim] + first, min(step, size[dim] - first)
    return tuple(begin), tuple(size)


def _in_order_of_cutting(degrees: Sequence[int], placements: Sequence[Any]) -> list[int]:
    """Return the mesh axes that split the tensor, in order of the splits: strided ones after all to their right."""
    plain: list[int] = []
    strided: list[int] = []
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{placement}: what still has to be summed over ranks is not in blocks")
        if hasattr(placement, "split_factor"):
            later = [
                i for i in range(axis + 1, len(placements)) if getattr(placements[i], "dim", None) == placement.dim
            ]
            if placement.split_factor != prod(degrees[i] for i in later):
                raise ValueError(f"{tuple(placements)} over a mesh of {tuple(degrees)}: no block is contiguous")
            strided.insert(0, axis)
        elif hasattr(placement, "dim"):
            plain.append(axis)
    return plain + strided
