"""Causal attention, by the path that is fastest for the shapes at hand."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Documents(Protocol):
    """What attention reads of the models' context: document borders in flat tokens, or None."""

    cu_seqlens: tuple[int, ...] | None


def attention(
    q: Tensor, k: Tensor, v: Tensor, ctx: Documents, layer: int = 0, scale: float | None = None
) -> Tensor:
    """Causal attention within each document of each sequence.

    q ``[sequences, heads, length, head_dim]``; k, v the same with kv_heads, a divisor of heads. Returns q's shape.
    """
    if ctx.cu_seqlens is None:
        return _sdpa(q, k, v, scale)
    sequences, length = q.shape[0], q.shape[2]
    borders = sorted({*ctx.cu_seqlens, *range(0, sequences * length + 1, length)})
    pieces = []
    for begin, end in zip(borders, borders[1:]):
        row, first = divmod(begin, length)
        part = (slice(row, row + 1), slice(None), slice(first, first + end - begin))
        pieces.append(_sdpa(q[part], k[part], v[part], scale)[0])
    return torch.cat(pieces, dim=1).unflatten(1, (sequences, length)).transpose(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
