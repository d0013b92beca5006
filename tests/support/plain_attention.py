"""Attention by its definition, in the dtype of its inputs: the whole square of scores, a mask, a softmax."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def numbers_of(cu_seqlens: tuple[int, ...] | None, sequences: int) -> Tensor | None:
    """The number of each token's document, ``[sequences, length]``; None: sequences are whole."""
    if cu_seqlens is None:
        return None
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


def relative_errors(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor], grad: Tensor, **options: Any
) -> list[float]:
    """Of (output, dq, dk, dv) against `plain_attention` with these options in float64.

    dq and dk are 0 where each query sees one key: errors are relative to the upstream gradient there.
    """
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = plain_attention(*exact, **options)
    expected.backward(grad.double())
    out = function(*tensors)
    assert (out.shape, out.dtype) == (tensors[0].shape, tensors[0].dtype)
    out.backward(grad)
    pairs = [(out.detach(), expected.detach())] + [(a.grad, b.grad) for a, b in zip(tensors, exact)]
    floor = grad.double().norm() / 10
    return [float((a.double() - b).norm() / b.norm().clamp(min=floor)) for a, b in pairs]
