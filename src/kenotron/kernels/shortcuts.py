"""Tell when a kernel may take a shortcut: for small tensors, and if reading a value is free; cut and lay out rows."""

from collections.abc import Iterator

import torch
from torch import Tensor

SMALL = 1 << 15  # elements up to which kernels with several cached passes do not pay off


def is_small(x: Tensor) -> bool:
    """Return whether torch's own composition is faster for x: it needs no gradient and has few elements."""
    return not torch.is_grad_enabled() and x.numel() <= SMALL


def reads_are_free(x: Tensor) -> bool:
    """Return whether Python may read the value of x to save work; an accelerator would finish all queued work first."""
    return x.device.type == "cpu"


def row_blocks(rows: int, step: int) -> Iterator[slice]:
    """Yield the rows in blocks of `step`, at least 1."""
    for begin in range(0, rows, step := max(1, step)):
        yield slice(begin, min(begin + step, rows))


def unit_stride(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()
