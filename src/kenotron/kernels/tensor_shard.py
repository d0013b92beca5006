"""The block of a logical tensor that one rank holds: what models fill, checkpoints save and meshes compute.

rank 1 of two that share an [8, 4] matrix by rows     TensorShard(tensor [4, 4], shape=(8, 4), offset=(4, 0))
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TensorShard:
    """`tensor` is the block at `offset` of a logical tensor of `shape`; it shares the parameter's memory."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @staticmethod
    def full(tensor: Tensor) -> TensorShard:
        """The shard of a rank that holds all of `tensor`."""
        return TensorShard(tensor, tuple(tensor.shape), (0,) * tensor.dim())
