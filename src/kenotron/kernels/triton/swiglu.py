"""``silu(gate) * up`` in one launch forward and one backward; formulas and reference in `kernels.swiglu`.

With s = sigmoid(gate):   silu = gate s     dup = dy silu     dgate = dy up s (1 + gate (1 - s))
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kenotron.kernels.swiglu import Gate

BLOCK = 1024  # elements per program


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `kernels.swiglu.swiglu` with silu, for gate and up of one shape and dtype."""
    return Gate.apply(gate, up, _forward, _backward)


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y, count = torch.empty_like(gate), gate.numel()
    forward_kernel[(triton.cdiv(count, BLOCK),)](gate, up, y, count, BLOCK=BLOCK)
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    backward_kernel[(triton.cdiv(count, BLOCK),)](dy, gate, up, dgate, dup, count, BLOCK=BLOCK)
    return dgate, dup


@triton.jit
def forward_kernel(gate, up, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, g * tl.sigmoid(g) * u, mask=inside)


@triton.jit
def backward_kernel(dy, gate, up, dgate, dup, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    tl.store(dgate + at, d * u * s * (1.0 + g * (1.0 - s)), mask=inside)
    tl.store(dup + at, d * g * s, mask=inside)
