"""Attention by its definition, in the dtype of its inputs: the whole square of scores, a mask, a softmax."""

import math

import torch
from torch import Tensor


def numbers_of(cu_seqlens: tuple[int, ...], sequences: int) -> Tensor:
    """The number of each token's document, ``[sequences, length]``."""
    tokens = torch.arange(cu_seqlens[-1])
    return torch.bucketize(tokens, torch.tensor(cu_seqlens), right=True).view(sequences, -1)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    documents: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Of earlier tokens of the same document, `window` of them at most; key-value heads are repeated for queries."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.repeat_interleave(group, 1)
