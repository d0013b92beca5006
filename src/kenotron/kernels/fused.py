"""Triton's kernels in the place of torch's compositions on a GPU, where they are asked for.

    KENOTRON_KERNELS=triton     RMSNorm, rotary positions, SwiGLU and the softmax in the loss are one launch each
                                (`kernels.triton`)
    KENOTRON_KERNELS=torch      or not set: torch's operators

They are not the default because no GPU has measured them. Compiled blocks (`model.compile`) take torch's operators in
any case: the compiler fuses them by itself. The loss is not compiled, so its kernel is used there, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError, nearest

KEY = "KENOTRON_KERNELS"
CHOICES = ("torch", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused(name: str, x: Tensor) -> Callable[..., Any] | None:
    """The function `name` (``module.function`` of `kernels.triton`) if it is to compute with x, else None.

    Raises InputError if the environment asks for what is not there.
    """
    if x.device.type == "cpu" or torch.compiler.is_compiling():
        return None
    chosen = os.environ.get(KEY, "torch")
    if chosen == "torch":
        return None
    if chosen not in CHOICES:
        raise InputError(f"{KEY}: expected one of {', '.join(CHOICES)}, found {chosen!r}{nearest(chosen, CHOICES)}")
    if x.dtype not in DTYPES or x.numel() == 0:
        return None
    function: Callable[..., Any] = import_dotted(f"kenotron.kernels.triton.{name}", f"{KEY}={chosen}")
    return function
