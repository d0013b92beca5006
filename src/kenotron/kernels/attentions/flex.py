"""Torch's flex_attention: the mask and the softcap as functions, compiled into one kernel that skips hidden blocks.

    mask(b, h, i, j)  = j <= i  and  document(i) == document(j)  and  j > i - window
    score(s)          = softcap tanh(s / softcap)

A compiled model takes it into its graph; elsewhere on a GPU it is compiled by itself. On a CPU it is computed without
a kernel, and torch has no backward there.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kenotron.kernels.attention import Documents
from kenotron.kernels.attentions.documents import document_numbers, document_starts


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Documents,
    layer: object = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `kernels.attention`, with `softcap` as in `masked.eager`."""
    sequences, _, length, _ = q.shape
    starts = document_starts(ctx, sequences, length, q.device)
    in_a_graph = q.device.type == "cpu" or torch.compiler.is_compiling()
    return (_flex if in_a_graph else _compiled())(q, k, v, starts, scale, window, softcap)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_flex)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float | None, window: int | None, softcap: float | None
) -> Tensor:
    sequences, heads, length, _ = q.shape
    numbers = document_numbers(starts, sequences, length)
    left = length if window is None else window

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j > i - left) & (numbers[b, i] == numbers[b, j])

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    blocks = create_block_mask(mask, sequences, None, length, length, device=q.device)
    grouped = heads != k.shape[1]
    out = flex_attention(q, k, v, score_mod=capped, block_mask=blocks, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out
