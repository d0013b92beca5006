"""Arguments for Mamba's scans and convolution, and all that comes out of them: what tests of their kernels share.

everything("causal_conv", length=70, documents=True, goes_on=False)     # [y, last, dx, dweight, dbias]
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kenotron.kernels.causal_conv import causal_conv
from kenotron.kernels.selective_scan import selective_scan
from kenotron.kernels.state_space_dual import state_space_dual

SEQUENCES, CHANNELS, N, WIDTH = 2, 8, 3, 4
HEADS, HEAD_DIM, GROUPS = 4, 2, 2
# One begins at the first token of a sequence: what is before it is forgotten at once.
BORDERS = [(0, 1), (0, 2), (0, 32), (0, 64), (1, 0), (1, 31), (1, 69), (1, 256), (0, 300)]
# (name, documents, goes on from a state); the package's selective scan has neither
CASES = [("selective_scan", False, False)]
CASES += [(name, *case) for name in ("causal_conv", "state_space_dual") for case in product((False, True), repeat=2)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def conv_inputs(length: int) -> list[Tensor]:
    taps = [random(CHANNELS, 1, WIDTH), random(CHANNELS)]
    return [random(SEQUENCES, length, CHANNELS), *taps, random(SEQUENCES, WIDTH - 1, CHANNELS)]


def channel_inputs(length: int) -> list[Tensor]:
    dt, states = random(SEQUENCES, length, CHANNELS, seed=1).exp(), (SEQUENCES, length, N)
    rest = [-random(CHANNELS, N).exp(), random(*states, seed=2), random(*states, seed=3), random(CHANNELS)]
    return [random(SEQUENCES, length, CHANNELS), dt, *rest, random(SEQUENCES, CHANNELS, N)]


def head_inputs(length: int) -> list[Tensor]:
    dt, states = random(SEQUENCES, length, HEADS, seed=1).exp(), (SEQUENCES, length, GROUPS, N)
    rest = [-random(HEADS).exp(), random(*states, seed=2), random(*states, seed=3), random(HEADS)]
    return [random(SEQUENCES, length, HEADS, HEAD_DIM), dt, *rest, random(SEQUENCES, HEADS, HEAD_DIM, N)]


KINDS: dict[str, tuple[Callable[..., Any], Callable[[int], list[Tensor]]]] = {
    "causal_conv": (causal_conv, conv_inputs),
    "selective_scan": (selective_scan, channel_inputs),
    "state_space_dual": (state_space_dual, head_inputs),
}


def everything(
    name: str,
    length: int,
    documents: bool,
    goes_on: bool,
    dtype: torch.dtype = torch.float32,
    wide: bool = False,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Output, what comes after the last token, and the gradient of each input for upstream gradients of both.

    Inputs are rounded to `dtype`, but for time steps, rates and states, and computed with in it, or in float64 if
    `wide`.
    """
    function, make = KINDS[name]
    in_fp32 = (7,) if name == "causal_conv" else (1, 2, 6)
    rounded = [each if number in in_fp32 else each.to(dtype) for number, each in enumerate(make(length))]
    placed = [(each.double() if wide else each).to(device) for each in rounded]
    *given, first = (each.requires_grad_() for each in placed)
    starts = torch.zeros(SEQUENCES, max(length, 301), dtype=torch.bool)
    starts[tuple(zip(*BORDERS))] = True
    y, last = function(*given, starts[:, :length].to(device) if documents else None, first if goes_on else None)
    wanted = [y] if name == "selective_scan" else [y, last]
    upstream = [random(*each.shape, seed=7).to(dtype).to(each) for each in wanted]
    inputs = [*given, first] if goes_on else given
    return [y.detach(), last.detach(), *torch.autograd.grad(wanted, inputs, upstream)]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Of all tensors, as a part of the expected one's norm."""
    errors = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)]
    return max(errors)
