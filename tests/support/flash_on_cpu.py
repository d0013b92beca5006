"""FlashAttention's varlen kernels of torch, played on the CPU: the branch of a GPU then runs without one.

Torch's operators ``torch_attn::_varlen_attn`` and its backward get a CPU kernel that loops over the documents and
computes by the definition, after checking what the CUDA kernels take for granted: flat tensors, int32 borders from 0
to the tokens, heads side by side in memory. Windows are FlashAttention's: ``(left, right)`` keys on each side of the
query, which itself is always seen, -1 for no bound.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kenotron.kernels.attentions.packed import ASKS_FOR_GROUPS

DEFAULTS = (False, None, None, not ASKS_FOR_GROUPS)  # is_causal, scale, window_size, enable_gqa


@cache
def install() -> list[int]:
    """Register the kernels, once a process; returns the list that gets the number of documents of every call."""
    from torch.nn.attention import varlen

    calls: list[int] = []

    def forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *more: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_causal, scale, window, grouped = (*more, *DEFAULTS[len(more) :])[:4]  # the dispatcher leaves defaults out
        assert torch.equal(cu_q, cu_k)
        check(q, k, v, cu_q, max_q, grouped)
        calls.append(len(cu_q) - 1)
        out, lse = by_definition(q, k, v, cu_q, is_causal, scale, window)
        return out, lse, torch.zeros(2, dtype=torch.uint64)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, *more: Any
    ) -> tuple[Tensor, ...]:
        _, max_q, _, is_causal, _, scale, window = (*more, None)[:7]
        check(q, k, v, cu_q, max_q, True)
        return gradients(grad, q, k, v, cu_q, is_causal, scale, window)

    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)
    return calls


def check(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, grouped: bool) -> None:
    assert starts.dtype == torch.int32
    assert starts.is_contiguous()
    assert (int(starts[0]), int(starts[-1])) == (0, len(q))
    assert int(starts.diff().min()) > 0
    assert int(starts.diff().max()) <= longest
    assert [(x.dim(), x.stride(-1)) for x in (q, k, v)] == [(3, 1)] * 3
    assert grouped or q.shape[1] == k.shape[1]


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, is_causal: bool, scale: float | None, window: list[int] | None
) -> tuple[Tensor, Tensor]:
    """(out ``[tokens, heads, head_dim]``, log-sum-exp ``[heads, tokens]``), in float64 inside."""
    outs, sums = [], []
    for dq, dk, dv in documents((q, k, v), starts, q.shape[1]):
        scores = masked_scores(dq, dk, is_causal, scale, window)
        outs.append((scores.softmax(-1) @ dv).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs).to(q.dtype), torch.cat(sums, 1).float()


def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *mask: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv. By hand: torch calls a kernel of its own operators where nothing records gradients."""
    is_causal, scale, window = mask
    found: tuple[list[Tensor], ...] = ([], [], [])
    heads, kv_heads = q.shape[1], k.shape[1]
    for g, dq, dk, dv in documents((grad, q, k, v), starts, heads):
        p = masked_scores(dq, dk, is_causal, scale, window).softmax(-1)
        dp = g @ dv.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        found[0].append((ds @ dk).transpose(0, 1))
        for sums, each in ((found[1], ds.mT @ dq), (found[2], p.mT @ g)):
            sums.append(each.unflatten(0, (kv_heads, heads // kv_heads)).sum(1).transpose(0, 1))
    return tuple(torch.cat(each).to(q.dtype) for each in found)


def documents(tensors: tuple[Tensor, ...], starts: Tensor, heads: int) -> Iterator[list[Tensor]]:
    """``[heads, length, head_dim]`` of every document, in float64, each key-value head repeated for its queries."""
    for begin, end in pairwise(starts.tolist()):
        some = (x[begin:end].transpose(0, 1).double() for x in tensors)
        yield [x.repeat_interleave(heads // x.shape[0], 0) for x in some]


def masked_scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None, window: list[int] | None) -> Tensor:
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    offset = torch.arange(q.shape[1]) - torch.arange(q.shape[1])[:, None]  # key - query
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if left >= 0:
        hidden |= offset < -left
    if right >= 0:
        hidden |= offset > right
    return (q @ k.mT * scale).masked_fill(hidden, float("-inf"))
