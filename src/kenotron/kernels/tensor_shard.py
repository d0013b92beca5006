"""The block of a logical tensor that one rank holds: what models fill, checkpoints save and meshes compute.

rank 1 of two that share an [8, 4] matrix by rows     TensorShard(tensor [4, 4], shape=(8, 4), offset=(4, 0))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorShard:
    """`tensor` is the block at `offset` of a logical tensor of `shape`; it shares the parameter's memory.

    With `read`, `tensor` only says shape and dtype (on the meta device), and `elements` calls `read`.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    read: Callable[[], Tensor] | None = None

    def elements(self) -> Tensor:
        """The block's elements."""
        return self.tensor if self.read is None else self.read()

    @staticmethod
    def full(tensor: Tensor) -> TensorShard:
        """The shard of a rank that holds all of `tensor`."""
        return TensorShard(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @staticmethod
    def later(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> TensorShard:
        """All of a tensor that is on the host only while it is saved: a conversion never holds the whole model."""
        return TensorShard(torch.empty(shape, dtype=dtype, device="meta"), tuple(shape), (0,) * len(shape), read)
