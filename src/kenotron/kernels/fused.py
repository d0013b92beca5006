"""Kernels in the place of torch's compositions on a GPU, by name; found when they are first used.

    KENOTRON_KERNELS=triton     scans and convolutions of Mamba by mamba_ssm and causal_conv1d, where these packages are
                                installed (`kernels.mamba_packages`); one launch each for RMSNorm, rotary positions,
                                SwiGLU, the same weighed in experts, the sum over a token's experts, and the softmax in
                                the loss (`kernels.triton`)
    KENOTRON_KERNELS=torch      torch's operators alone, those for matrices too (see `kernels.products`)
    not set                     as with triton on NVIDIA's GPUs; elsewhere the packages, and torch's operators else

On an H200 a step of Llama 1B takes 144 ms with those in Triton and 167 without (docs/benchmarks.md); no GPU of AMD's
has measured them. Compiled blocks (`model.compile`) take torch's operators in any case: the compiler fuses them by
itself. The loss and the experts are not compiled, so their kernels are used there, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
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
    if not suits(x) or (chosen() or _measured(x.device)) != "triton":
        return None
    function: Callable[..., Any] = import_dotted(f"kenotron.kernels.triton.{name}", f"{KEY}=triton")
    return function


def suits(x: Tensor) -> bool:
    """Whether kernels in the place of torch's compositions could compute with x."""
    return x.device.type != "cpu" and not torch.compiler.is_compiling() and x.dtype in DTYPES and x.numel() > 0


@cache
def _measured(device: torch.device) -> str:
    """What is faster on `device` by measurement."""
    return "triton" if device.type == "cuda" and torch.version.hip is None and find_spec("triton") else "torch"


def chosen() -> str | None:
    """The value of `KEY`, checked."""
    found = os.environ.get(KEY)
    if found not in (None, *CHOICES):
        raise InputError(f"{KEY}: expected one of {', '.join(CHOICES)}, found {found!r}{nearest(found, CHOICES)}")
    return found
