"""Few numbers and no gradient, as in a step of decoding: calling a kernel then costs more than passes over memory."""

from __future__ import annotations

import torch
from torch import Tensor

SMALL = 1 << 15  # numbers; kernels with several passes in a cache begin to pay beyond


def is_small(x: Tensor) -> bool:
    """Whether x is for torch's own composition: no gradient is wanted, and a pass over x takes a microsecond or two."""
    return not torch.is_grad_enabled() and x.numel() <= SMALL
