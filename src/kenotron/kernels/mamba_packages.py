"""Mamba's scans and convolution by the packages mamba_ssm and causal_conv1d, with the plain functions' arguments.

    causal_conv         causal_conv1d_fn             [sequences, channels, length], channels contiguous in memory
    selective_scan      selective_scan_fn            [sequences, channels, length]; no documents, no initial state
    state_space_dual    mamba_chunk_scan_combined    the same layout

The first and the last identify documents by numbers (``seq_idx``). The initial state or inputs belong to document 0,
which includes the tokens up to the first start of a document:

    starts      0 0 1 0 1        1 0 0 1 0
    numbers     0 0 1 1 2        1 1 1 2 2        the initial state is dropped at once

`packaged` imports the packages at first use, and passes their functions as `kernel`.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.config.dotted import import_dotted
from kenotron.kernels.fused import KEY, chosen, suits

Kernel = Callable[..., Any]
logger = logging.getLogger("kenotron")
CHUNK = 256  # tokens of a chunk in mamba_ssm's own Mamba-2, and in the published models


def causal_conv(
    kernel: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.causal_conv`, for widths 2 to 4 and multiples of 8 channels.

    Previous inputs are prepended to x, because the package accepts them (`initial_states`) only without documents.
    """
    reach, numbers = weight.shape[2] - 1, _numbers(starts)
    inputs = x if state is None else torch.cat([state.to(x.dtype), x], dim=1)
    before = inputs.shape[1] - x.shape[1]
    if numbers is not None:
        numbers = F.pad(numbers, (before, 0))
    y = kernel(inputs.contiguous().mT, weight[:, 0], bias, seq_idx=numbers).mT
    return y[:, before:], F.pad(inputs[:, -reach:], (0, 0, max(0, reach - inputs.shape[1]), 0))


def selective_scan(
    kernel: Kernel, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.selective_scan` for whole sequences, also in fp32; its last state has no gradient."""
    u, delta, b, c = (each.float().mT for each in (x, dt, b, c))
    y, last = kernel(u, delta, a.float(), b, c, d.float(), return_last_state=True)
    return y.mT.to(x.dtype), _WithoutGradient.apply(last)


def state_space_dual(
    kernel: Kernel,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `kernels.state_space_dual`, with products in x's dtype and sums in fp32."""
    return kernel(
        *(x, dt.float(), a.float(), b, c, CHUNK),
        D=d,
        initial_states=state,
        seq_idx=_numbers(starts),
        return_final_states=True,
    )


def _numbers(starts: Tensor | None) -> Tensor | None:
    """Return each token's document number, as in the example above."""
    return None if starts is None else starts.cumsum(1, dtype=torch.int32)


class _WithoutGradient(torch.autograd.Function):
    """Returns the same tensor, whose gradient is an error: the package would silently omit it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise RuntimeError("mamba_ssm's selective_scan_fn has no gradient of the last state: use scan_by_chunks")


_OPS = "mamba_ssm.ops"
# name → the function of this file, the module with the CUDA code, the package's function
PACKAGES: dict[str, tuple[Kernel, str, str]] = {
    "causal_conv": (causal_conv, "causal_conv1d_cuda", "causal_conv1d.causal_conv1d_fn"),
    "selective_scan": (selective_scan, "selective_scan_cuda", f"{_OPS}.selective_scan_interface.selective_scan_fn"),
    "state_space_dual": (state_space_dual, "mamba_ssm", f"{_OPS}.triton.ssd_combined.mamba_chunk_scan_combined"),
}


def packaged(name: str, x: Tensor) -> Kernel | None:
    """Return the function `name` of `PACKAGES` if it should be used for x ``[sequences, length, …]``, else None.

    It is None for single tokens, as in generation, which would gain nothing, and with deterministic algorithms, because
    backward sums in varying order. Raises InputError if a package is installed but cannot be imported.
    """
    if x.device.type != "cuda" or not suits(x) or x.shape[1] == 1 or torch.are_deterministic_algorithms_enabled():
        return None
    return None if chosen() == "torch" else _from_package(name)


@cache
def _from_package(name: str) -> Kernel | None:
    function, module, path = PACKAGES[name]
    if find_spec(module) is None:
        logger.info("Kernel of %s: torch; %s is not installed (pip install 'kenotron[mamba]')", name, module)
        return None
    package_function = import_dotted(path, f"{KEY}: torch does without {path.partition('.')[0]}")
    logger.info("Kernel of %s: %s", name, path)
    return partial(function, package_function)
