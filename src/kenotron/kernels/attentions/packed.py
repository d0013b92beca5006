"""Flash attention over packed documents, in one kernel launch for any number of them.

Sequences are concatenated, and the kernel receives the borders (`documents.document_starts`):

    [2, heads, 4, head_dim]  →  [8, heads, head_dim] and starts (0, 4, 6, 8)  →  [2, heads, 4, head_dim]

Kernels need a bound of the longest document: they launch blocks for this number of tokens of each document, and those
beyond its end do nothing. On an H200, with 42 documents of at most 771 tokens in two sequences of 4096, forward and
backward take 1.58 ms with a bound of 4096 and 1.09 ms with 771 (32 heads of 64). The bound has few values
(`bound_of_documents`), because the exact length would be a new constant of a compiled model in every batch.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from kenotron.kernels.attention import Documents
from kenotron.kernels.attentions.documents import document_starts
from kenotron.kernels.shortcuts import unit_stride

# torch 2.11 also supports fewer heads of keys than of queries, but has no flag for it.
ASKS_FOR_GROUPS = "enable_gqa" in signature(varlen_attn).parameters


def torch_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Documents,
    layer: object = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute `kernels.attention` by ``torch.nn.attention.varlen``: FlashAttention 2, or the version of `activate`."""
    grouped: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if ASKS_FOR_GROUPS else {}
    out = varlen_attn(*_flat(q, k, v, ctx), scale=scale, window_size=_left(q, window), **grouped)
    assert isinstance(out, Tensor)
    return _folded(out, q)


def flash_attn_package(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Documents,
    layer: object = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute `kernels.attention` by the package flash_attn (extra `flash`), which supports softcaps."""
    from flash_attn import flash_attn_varlen_func

    out = flash_attn_varlen_func(
        *_flat(q, k, v, ctx),
        softmax_scale=scale,
        causal=True,
        window_size=_left(q, window),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return _folded(out, q)


def activate(version: str) -> None:
    """Replace torch's own FlashAttention by ``FA3`` or ``FA4`` in this process."""
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(version)


def _flat(q: Tensor, k: Tensor, v: Tensor, ctx: Documents) -> tuple[Any, ...]:
    """Return the first arguments of kernels: three flat tensors, borders twice, and their bound twice."""
    sequences, _, length, _ = q.shape
    starts = document_starts(ctx, sequences, length, q.device)
    longest = length if ctx.longest is None else ctx.longest
    return (*(unit_stride(x).transpose(1, 2).flatten(0, 1) for x in (q, k, v)), starts, starts, longest, longest)


def _left(q: Tensor, window: int | None) -> tuple[int, int]:
    """Return a window as kernels count it: tokens to the left and right, without the query itself."""
    return (-1 if window is None or window >= q.shape[2] else window - 1), 0


def _folded(out: Tensor, q: Tensor) -> Tensor:
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)
