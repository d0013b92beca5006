"""A rank's block of a global tensor, which models fill and checkpoints save.

rank 1 of two that share an [8, 4] matrix by rows     TensorShard(tensor [4, 4], shape=(8, 4), offset=(4, 0))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorShard:
    """`tensor` is the block at `offset` of a global tensor of `shape`; it shares the parameter's memory.

    With `read`, `tensor` is on the meta device and only has shape and dtype, and `elements` calls `read`.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    read: Callable[[], Tensor] | None = None

    def elements(self) -> Tensor:
        """Return the block's elements."""
        return self.tensor if self.read is None else self.read()

    def up_to(self, rows: int) -> TensorShard:
        """Return the block's part in the global tensor's first `rows` rows, without rows that pad a vocabulary."""
        here = min(max(rows - self.offset[0], 0), self.tensor.shape[0])
        return TensorShard(self.tensor[:here], (rows, *self.shape[1:]), self.offset)

    def parts(self, at_once: int) -> Iterator[tuple[slice, ...]]:
        """Yield indices of `tensor` that cover it in order, each of at most `at_once` elements."""
        sizes = self.tensor.shape
        steps = [max(1, min(size, at_once // max(1, prod(sizes[dim + 1 :])))) for dim, size in enumerate(sizes)]
        for starts in product(*(range(0, size, step) for size, step in zip(sizes, steps))):
            yield tuple(slice(start, min(start + step, n)) for start, step, n in zip(starts, steps, sizes))

    def numbers(self, part: tuple[slice, ...], device: torch.device | str) -> Tensor:
        """Return the row-major index in the global tensor of every element of a part, as int64 on `device`.

        In a tensor [4, 6], a shard [4, 3] at offset (0, 3) has the elements 3, 4, 5, 9, 10, 11, 15, …
        """
        found = torch.zeros((), dtype=torch.int64, device=device)
        for along, offset, whole in zip(part, self.offset, self.shape):
            found = found[..., None] * whole + torch.arange(offset + along.start, offset + along.stop, device=device)
        return found

    @staticmethod
    def full(tensor: Tensor) -> TensorShard:
        """Return the shard of a rank that holds all of `tensor`."""
        return TensorShard(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @staticmethod
    def later(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> TensorShard:
        """Return a whole tensor that is read only when it is saved, so that conversions never hold the whole model."""
        return TensorShard(torch.empty(shape, dtype=dtype, device="meta"), tuple(shape), (0,) * len(shape), read)
