"""Fused kernels that replace torch's compositions on a GPU, by name, imported at first use.

    model.kernels: triton     scans and convolutions of Mamba by mamba_ssm and causal_conv1d, where these packages are
                              installed (`kernels.mamba_packages`); one launch each for RMSNorm, rotary positions,
                              SwiGLU, the same weighed in experts, the sum over a token's experts, and the softmax in
                              the loss (`kernels.triton`)
    model.kernels: torch      only torch's operators, also for matrices (see `kernels.products`)
    null                      on NVIDIA GPUs as with triton; elsewhere the packages, and otherwise torch's operators

On an H200 a step of Llama 1B takes 144 ms with the Triton kernels and 167 without (docs/benchmarks.md); they have not
been measured on AMD GPUs. Compiled blocks (`model.compile`) always use torch's operators, because the compiler fuses
them itself. The loss and the experts are not compiled, so their kernels are used with `model.compile` as well.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kenotron.config.dotted import import_dotted

KEY = "model.kernels"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fused(name: str, x: Tensor) -> Callable[..., Any] | None:
    """Return the function `name` (``module.function`` of `kernels.triton`) if it should be used for x, else None.

    Raises InputError if the config names kernels that are not available.
    """
    if not suits(x) or (chosen() or _measured(x.device)) != "triton":
        return None
    return import_dotted(f"kenotron.kernels.triton.{name}", f"{KEY}: triton")


def suits(x: Tensor) -> bool:
    """Return whether fused kernels support x."""
    return x.device.type != "cpu" and not torch.compiler.is_compiling() and x.dtype in DTYPES and x.numel() > 0


@cache
def _measured(device: torch.device) -> str:
    """Return the choice that is faster on `device` by measurement."""
    return "triton" if device.type == "cuda" and torch.version.hip is None and find_spec("triton") else "torch"


_chosen: str | None = None  # set by `use_kernels`; no ContextVar, because backward runs in autograd's threads


@contextmanager
def use_kernels(choice: str | None) -> Iterator[None]:
    """Make the process use the kernels of `choice`, the value of `model.kernels`, within the block."""
    global _chosen
    before, _chosen = _chosen, choice
    try:
        yield
    finally:
        _chosen = before


def chosen() -> str | None:
    """Return the current choice of `use_kernels`."""
    return _chosen
