"""The passes of `kernels.linear_cross_entropy` over the logits, in place and in one launch.

A program per row makes two passes in blocks of columns: the first computes the maximum and the sum of exponentials,
rescaled whenever the maximum grows (online softmax, Milakov & Gimelshein 2018, arXiv 1805.02867); the second writes the
exponentials, which are the gradient of the logits except for a factor and the label's entry.

    row 0 ln2 ln3, blocks of one     max 0 ln2 ln3     sum 1   1/2 + 1   3/2 * 2/3 + 1 = 2     row 1/3 2/3 1
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # columns per block


def exp_rows_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``logits[i] = exp(logits[i] - max_i)`` in place, in fp32, as `linear_cross_entropy._exp_rows_`.

    logits ``[n, columns]``, each row contiguous; returns max and the sums, ``[n, 1]`` fp32.
    """
    n, columns = logits.shape
    largest, total = torch.empty(2, n, 1, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    kernel[(n,)](logits, largest, total, columns, logits.stride(0), BLOCK=block)
    return largest, total


@triton.jit
def kernel(logits, largest, total, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    here = logits + row * stride
    top = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([], tl.float32)
    for begin in range(0, columns, BLOCK):
        a = tl.load(here + begin + at, mask=begin + at < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(a, axis=0))
        mass = mass * tl.exp(top - higher) + tl.sum(tl.exp(a - higher), axis=0)
        top = higher
    tl.store(largest + row, top)
    tl.store(total + row, mass)
    for begin in range(0, columns, BLOCK):
        inside = begin + at < columns
        a = tl.load(here + begin + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(here + begin + at, tl.exp(a - top), mask=inside)
