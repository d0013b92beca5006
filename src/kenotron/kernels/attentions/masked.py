"""Attention of whole sequences in one call, with a mask over the keys that a query must not attend to.

    documents (0, 2, 4)     mask  1 . . .        with a window of 1:   1 . . .
                                  1 1 . .                              . 1 . .
                                  . . 1 .                              . . 1 .
                                  . . 1 1                              . . . 1

Work and mask grow with the square of the length, for any documents. It is used if no kernel that skips hidden blocks is
available; `eager` is the plain form, which works on every device and dtype, as a reference for the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.attention import Documents
from kenotron.kernels.attentions.documents import document_numbers, document_starts, has_documents


def visible(q: Tensor, ctx: Documents, window: int | None, rows: Tensor | None = None) -> Tensor:
    """Return which keys each query sees, bool ``[sequences or 1, 1, rows, length]``, for q as in `kernels.attention`.

    `rows`: the indices of the queries; None: all.
    """
    sequences, _, length, _ = q.shape
    places = torch.arange(length, device=q.device)
    rows = places if rows is None else rows
    seen = (places <= rows[:, None])[None, None]
    if window is not None and window < length:
        seen = seen & (places > rows[:, None] - window)
    if has_documents(ctx):
        starts = document_starts(ctx, sequences, length, q.device)
        numbers = document_numbers(starts, sequences, length)
        seen = seen & (numbers[:, None, rows, None] == numbers[:, None, None, :])
    return seen


def sdpa_with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Documents,
    layer: object = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute `kernels.attention` by one call of torch's scaled_dot_product_attention."""
    grouped = q.shape[1] != k.shape[1]
    mask = visible(q, ctx, window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Documents,
    layer: object = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `kernels.attention` by two matrix products and a softmax in fp32.

    `softcap` c bounds the scores s: ``c tanh(s / c)`` (Gemma 2, arXiv 2408.00118).
    """
    sequences, heads, length, head_dim = q.shape
    grouped = q.view(sequences, k.shape[1], heads // k.shape[1], length, head_dim)
    scores = grouped @ k.unsqueeze(2).mT
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(q, ctx, window).unsqueeze(2), float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v.unsqueeze(2)).view(q.shape)
