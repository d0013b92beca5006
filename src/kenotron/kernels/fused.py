"""Kernels in the place of torch's compositions on a GPU, by name; found when they are first used.

    KENOTRON_KERNELS not set    scans and convolutions of Mamba by mamba_ssm and causal_conv1d, where these packages are
                                installed (`kernels.mamba_packages`); torch's operators for the rest
    KENOTRON_KERNELS=triton     these, and one launch each for RMSNorm, rotary positions, SwiGLU, the same weighed in
                                experts, the sum over a token's experts, and the softmax in the loss (`kernels.triton`)
    KENOTRON_KERNELS=torch      torch's operators alone, those for matrices too (see `kernels.products`)

Those in Triton are not the default because no GPU has measured them. Compiled blocks (`model.compile`) take torch's
operators in any case: the compiler fuses them by itself. The loss and the experts are not compiled, so their kernels
are used there, too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError, nearest

logger = logging.getLogger("kenotron")
KEY = "KENOTRON_KERNELS"
CHOICES = ("torch", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PACKAGES = {  # functions of `kernels.mamba_packages` → the module with the code for CUDA, the package's function
    "causal_conv": ("causal_conv1d_cuda", "causal_conv1d.causal_conv1d_fn"),
    "selective_scan": ("selective_scan_cuda", "mamba_ssm.ops.selective_scan_interface.selective_scan_fn"),
    "state_space_dual": ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined"),
}


def fused(name: str, x: Tensor) -> Callable[..., Any] | None:
    """The function `name` (``module.function`` of `kernels.triton`) if it is to compute with x, else None.

    Raises InputError if the environment asks for what is not there.
    """
    if not _suits(x) or chosen() != "triton":
        return None
    function: Callable[..., Any] = import_dotted(f"kenotron.kernels.triton.{name}", f"{KEY}=triton")
    return function


def packaged(name: str, x: Tensor) -> Callable[..., Any] | None:
    """The function `name` of `kernels.mamba_packages` if it is to compute with x ``[sequences, length, …]``, else None.

    Single tokens, as in generation, gain nothing; with deterministic algorithms it is None, because backward adds in
    any order. Raises InputError if a package is installed and cannot be imported.
    """
    if x.device.type != "cuda" or not _suits(x) or x.shape[1] == 1 or torch.are_deterministic_algorithms_enabled():
        return None
    return None if chosen() == "torch" else _from_package(name)


def _suits(x: Tensor) -> bool:
    return x.device.type != "cpu" and not torch.compiler.is_compiling() and x.dtype in DTYPES and x.numel() > 0


def chosen() -> str | None:
    """The value of `KEY`, checked."""
    found = os.environ.get(KEY)
    if found not in (None, *CHOICES):
        raise InputError(f"{KEY}: expected one of {', '.join(CHOICES)}, found {found!r}{nearest(found, CHOICES)}")
    return found


@cache
def _from_package(name: str) -> Callable[..., Any] | None:
    module, path = PACKAGES[name]
    if find_spec(module) is None:
        logger.info("Kernel of %s: torch; %s is not installed (pip install 'kenotron[mamba]')", name, module)
        return None
    theirs = import_dotted(path, f"{KEY}=torch does without {path.partition('.')[0]}")
    logger.info("Kernel of %s: %s", name, path)
    return partial(import_dotted(f"kenotron.kernels.mamba_packages.{name}", KEY), theirs)
