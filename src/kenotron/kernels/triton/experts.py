"""The experts' gates between matrix products, in one launch forward and one backward, and the sum of slots.

The references are `kernels.experts` and `kernels.token_slots.sum_of_slots`. With s = sigmoid(gate) and d the gradient
of the output, which has a row for each slot:

    hidden = w p       p = gate s up       dw = sum over the row of d p
                                           dup = d w gate s        dgate = d w up s (1 + gate (1 - s))

For rows of width F, torch's operators move 29 times rows x F elements, these kernels 9 times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns per block


def gate_and_weigh(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """Return ``silu(gate) * up * weights`` in gate's dtype; gate and up ``[rows, width]``, weights ``[rows, 1]``."""
    gate, up = gate.contiguous(), up.contiguous()
    rows, width = gate.shape
    hidden, block = torch.empty_like(gate), _block(width)
    forward_kernel[(rows, triton.cdiv(width, block))](gate, up, weights, hidden, width, BLOCK=block)
    return hidden


def gate_and_weigh_backward(d: Tensor, gate: Tensor, up: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Return dgate, dup, ``silu(gate) * up * weights`` (in the memory of d) and dweights ``[rows]`` fp32."""
    d, gate, up = d.contiguous(), gate.contiguous(), up.contiguous()
    rows, width = gate.shape
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    dweights = torch.empty(rows, dtype=torch.float32, device=gate.device)
    backward_kernel[(rows,)](d, gate, up, weights, dgate, dup, dweights, width, BLOCK=_block(width))
    return dgate, dup, d, dweights


def sum_of_slots(rows: Tensor, order: Tensor, tokens: int, slots: int) -> Tensor:
    """Compute `kernels.token_slots.sum_of_slots` in one pass over the rows, without torch's sorted copy."""
    rows = rows.contiguous()
    features, block = rows.shape[1], _block(rows.shape[1])
    row_of_slot = torch.full((tokens * slots,), -1, dtype=torch.int32, device=rows.device)  # -1: the slot is dropped
    row_of_slot[order] = torch.arange(len(order), dtype=torch.int32, device=rows.device)
    out = rows.new_empty(tokens, features)
    sum_kernel[(tokens, triton.cdiv(features, block))](rows, row_of_slot, out, features, SLOTS=slots, BLOCK=block)
    return out


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(columns))


@triton.jit
def forward_kernel(gate, up, weights, hidden, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, here = at < width, row * width + at
    g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weights + row).to(tl.float32)
    tl.store(hidden + here, g * tl.sigmoid(g) * u * w, mask=inside)


@triton.jit
def backward_kernel(d, gate, up, weights, dgate, dup, dweights, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(weights + row).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside, here = at < width, row * width + at
        up_grad = tl.load(d + here, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + here, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + here, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        p = g * s * u
        total += up_grad * p
        tl.store(dgate + here, up_grad * w * u * s * (1.0 + g * (1.0 - s)), mask=inside)
        tl.store(dup + here, up_grad * w * g * s, mask=inside)
        tl.store(d + here, p * w, mask=inside)
    tl.store(dweights + row, tl.sum(total, axis=0))


@triton.jit
def sum_kernel(rows, row_of_slot, out, features, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in range(SLOTS):
        row = tl.load(row_of_slot + token * SLOTS + slot).to(tl.int64)
        inside = (at < features) & (row >= 0)
        total += tl.load(rows + row * features + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * features + at, total, mask=at < features)
