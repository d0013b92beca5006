"""When a kernel may leave its usual way: for few numbers, and where looking at a value costs nothing."""

import torch
from torch import Tensor

SMALL = 1 << 15  # numbers; kernels with several passes in a cache begin to pay beyond


def is_small(x: Tensor) -> bool:
    """Whether x is for torch's own composition: no gradient is wanted, and a pass over x takes a microsecond or two."""
    return not torch.is_grad_enabled() and x.numel() <= SMALL


def reads_are_free(x: Tensor) -> bool:
    """Whether Python may look at the value of x to save work; on an accelerator it waits for all queued work."""
    return x.device.type == "cpu"
