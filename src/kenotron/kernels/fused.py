"""Kernels in the place of torch's compositions on a GPU, by name; found when they are first used.

    model.kernels: triton     scans and convolutions of Mamba by mamba_ssm and causal_conv1d, where these packages are
                              installed (`kernels.mamba_packages`); one launch each for RMSNorm, rotary positions,
                              SwiGLU, the same weighed in experts, the sum over a token's experts, and the softmax in
                              the loss (`kernels.triton`)
    model.kernels: torch      torch's operators alone, those for matrices too (see `kernels.products`)
    null                      as with triton on NVIDIA's GPUs; elsewhere the packages, and torch's operators else

On an H200 a step of Llama 1B takes 144 ms with those in Triton and 167 without (docs/benchmarks.md); no GPU of AMD's
has measured them. Compiled blocks (`model.compile`) take torch's operators in any case: the compiler fuses them by
itself. The loss and the experts are not compiled, so their kernels are used there, too.
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
    """The function `name` (``module.function`` of `kernels.triton`) if it is to compute with x, else None.

    Raises InputError if the config asks for what is not there.
    """
    if not suits(x) or (chosen() or _measured(x.device)) != "triton":
        return None
    return import_dotted(f"kenotron.kernels.triton.{name}", f"{KEY}: triton")


def suits(x: Tensor) -> bool:
    """Whether kernels in the place of torch's compositions could compute with x."""
    return x.device.type != "cpu" and not torch.compiler.is_compiling() and x.dtype in DTYPES and x.numel() > 0


@cache
def _measured(device: torch.device) -> str:
    """What is faster on `device` by measurement."""
    return "triton" if device.type == "cuda" and torch.version.hip is None and find_spec("triton") else "torch"


_chosen: str | None = None  # by `use_kernels`; no ContextVar, as backward computes in threads of autograd


@contextmanager
def use_kernels(choice: str | None) -> Iterator[None]:
    """Within, the process computes with the kernels that `choice`, the value of `model.kernels`, stands for."""
    global _chosen
    before, _chosen = _chosen, choice
    try:
        yield
    finally:
        _chosen = before


def chosen() -> str | None:
    """Return the choice that `use_kernels` holds."""
    return _chosen
