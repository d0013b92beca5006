"""The ceiling: only the matrix products of a step, nothing else, in the step's dtype.

For every linear layer with weight W ``[out, in]`` and T tokens: forward ``x W^T``, the input's gradient ``g W``, the
weight's gradient ``g^T x``. For attention, the two products forward and four backward over the whole square, of which a
causal mask needs half, so three of the six count. Outputs of torch are allocated beforehand, and freed memory is kept:
no page fault is in this time. In fp32 on a CPU the products of linear layers are torch's own or oneDNN's, whichever are
faster; what oneDNN needs transposed is so before. A training step cannot be faster than this without better products.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from worker import Job, Pace

from kenotron.kernels.host_memory import keep_freed_memory


def train(job: Job, pace: Pace) -> None:
    keep_freed_memory()
    work = job.work
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    square = [(work.hidden, work.hidden)] * 4
    gated = [(work.intermediate, work.hidden)] * 2 + [(work.hidden, work.intermediate)]
    linears = (square + gated) * work.layers + [(work.vocab, work.hidden)]
    of_linear, of_attention = cache(_of_linear), cache(_of_attention)  # one set of buffers for equal shapes
    fastest = cache(_fastest)
    products = [
        fastest(*factors) for shape in linears for factors in of_linear(work.tokens, *shape, dtype, work.device)
    ]
    heads = (work.micro_batch * work.heads, work.sequence, work.hidden // work.heads)
    # six products a layer over the square, half of each needed: three stand for them
    products += [
        partial(torch.matmul, left, right, out=out) for left, right, out in of_attention(*heads, dtype, work.device)
    ] * work.layers
    while True:
        for product in products:
            product()
        pace(None)


def _fastest(left: Tensor, right: Tensor, out: Tensor) -> Callable[[], Tensor]:
    torchs = partial(torch.matmul, left, right, out=out)
    if left.dtype != torch.float32 or left.device.type != "cpu" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return torchs
    onednns = partial(torch.ops.mkldnn._linear_pointwise, left.contiguous(), right.t(), None, "none", [], "")
    return min(torchs, onednns, key=_seconds)


def _seconds(product: Callable[[], Tensor]) -> float:
    """The best of four."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        product()
        times.append(time.perf_counter() - begin)
    return min(times)


def _of_linear(tokens: int, rows: int, columns: int, dtype: torch.dtype, device: str) -> list[tuple[Tensor, ...]]:
    x, grad = _random(tokens, columns, dtype, device), _random(tokens, rows, dtype, device)
    weight = _random(rows, columns, dtype, device)
    pairs = [(x, weight.t()), (grad, weight), (grad.t(), x)]
    return [(left, right, torch.matmul(left, right)) for left, right in pairs]


def _of_attention(batch: int, length: int, head_dim: int, dtype: torch.dtype, device: str) -> list[tuple[Tensor, ...]]:
    q = torch.randn(batch, length, head_dim, device=device).to(dtype)
    scores = torch.randn(batch, length, length, device=device).to(dtype)
    pairs = [(q, q.transpose(1, 2)), (scores, q), (scores.transpose(1, 2), q)]
    return [(left, right, torch.matmul(left, right)) for left, right in pairs]


def _random(rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(rows, columns, device=device).to(dtype)
