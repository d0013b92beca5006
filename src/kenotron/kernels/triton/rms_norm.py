"""RMSNorm in one launch forward and one backward; formulas and reference in `kernels.rms_norm`.

Forward has a program for each row. Backward has a program for each group of rows, which keeps the group's sum of
dweight in registers; the groups' sums are added at the end. Number of groups and order of sums depend only on shapes.

    rows 0 … 5, 2 groups       program 0: rows 0 2 4       program 1: rows 1 3 5       dweight = sum 0 + sum 1
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kenotron.kernels.rms_norm import Normalization

GROUPS, WIDE = 256, 4096  # programs of the backward for rows of 4096: enough to fill today's GPUs


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `kernels.rms_norm.rms_norm` for x ``[..., hidden]``, weight ``[hidden]``, in x's shape and dtype."""
    return Normalization.apply(x.contiguous(), weight, eps, _forward, _backward)


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, hidden = x.shape
    y, r = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(hidden)
    forward_kernel[(rows,)](x, weight, y, r, hidden, eps, BLOCK=block, num_warps=_warps(block))
    return y, r


def _backward(dy: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    groups = min(GROUPS * max(1, WIDE // block), rows)
    dx = torch.empty_like(x)
    sums = torch.empty(groups, hidden, dtype=torch.float32, device=x.device)
    backward_kernel[(groups,)](dy, x, weight, r, dx, sums, rows, hidden, BLOCK=block, num_warps=_warps(block))
    return dx, sums.sum(0)


def _warps(block: int) -> int:
    """Return the number of warps with 16 elements per thread: backward keeps four values of each in registers."""
    return min(16, max(1, block // 512))


@triton.jit
def forward_kernel(x, weight, y, r, hidden, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    a = tl.load(x + row * hidden + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(a * a, axis=0) / hidden + eps)
    tl.store(r + row, scale)
    tl.store(y + row * hidden + at, a * scale * w, mask=inside)


@triton.jit
def backward_kernel(dy, x, weight, r, dx, sums, rows, hidden, BLOCK: tl.constexpr):
    group = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(group, rows, tl.num_programs(0)):
        here = tl.cast(row, tl.int64) * hidden + at
        up = tl.load(dy + here, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(r + row)
        g = up * w
        mean = tl.sum(g * a, axis=0) / hidden
        tl.store(dx + here, scale * g - a * scale * scale * scale * mean, mask=inside)
        total += up * a * scale
    tl.store(sums + group.to(tl.int64) * hidden + at, total, mask=inside)
