"""Causal attention, computed by the path that is fastest for the given shapes by measurement.

    softmax(scale * q k^T, keys up to the query's own position) v

Grouped-query attention: query head h reads key-value head ``h // (heads / kv_heads)``. With document borders every
document is a separate call, so that no token attends to another document and no masked scores are computed:
for ``cu_seqlens = (0, 4, 6, 8)`` and two sequences of 4, the calls have lengths 4, 2 and 2. Against one call with a
boolean mask that is 4.3 times faster for 8 documents in 1024 tokens (fp32), and slower (29 ms against 26, bf16) only
for documents of 32 tokens, where the calls themselves cost.

Paths, all behind :func:`attention`:

* torch's scaled_dot_product_attention (flash kernels on CPU and GPU);
* with a sliding window shorter than the sequence, one such call per block of queries, on the keys in its window;
* on CPU in bf16 at short lengths, its forward, with a backward of matrix products (`_explicit_backward_is_faster`);
* on CPUs that emulate bf16, everything in fp32, then rounded: forward and backward of 4 x 6 x 512 x 64 take 115 ms on
  one core, where SDPA in bf16 takes 685 (see `kernels.products`).
"""

from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.products import in_fp32
from kenotron.kernels.shortcuts import unit_stride

QUERY_BLOCK = 256  # queries of one call with a sliding window
GROUP = 1 << 19  # scores that the explicit backward holds at a time: 2 MiB in fp32, a core's L2 cache


class Documents(Protocol):
    """The fields of the models' context that attention reads."""

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        """Document borders in flat tokens, ``(0, ..., sequences * length)``; None: one document per sequence."""

    @property
    def document_starts(self) -> Tensor | None:
        """`cu_seqlens` on the device, as in `attentions.documents`; None: not created yet."""

    @property
    def longest(self) -> int | None:
        """An upper bound of the documents' lengths; None: unknown."""


class Borders(NamedTuple):
    """Documents for callers without a context."""

    cu_seqlens: tuple[int, ...] | None
    document_starts: Tensor | None = None
    longest: int | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ctx: Documents,
    layer: object = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within each document of each sequence.

    q ``[sequences, heads, length, head_dim]``, k and v the same with kv_heads, a divisor of heads; any strides.
    Returns q's shape. `scale` is ``head_dim ** -0.5`` by default. `window`: a query attends to itself and the
    ``window - 1`` tokens before it; None: to all before it. `layer`, the calling module, is for functions with a cache;
    it is an object, since compiled code would guard on the value of a number and recompile for every layer.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if in_fp32(q, k):
        return attention(q.float(), k.float(), v.float(), ctx, layer, scale, window).to(q.dtype)
    if ctx.cu_seqlens is None:
        return _causal(q, k, v, scale, window)
    if torch.compiler.is_compiling():  # borders change with every batch, which would recompile
        return torch.compiler.disable(_by_document)(q, k, v, ctx, scale, window)
    return _by_document(q, k, v, ctx, scale, window)


def _explicit_backward_is_faster(q: Tensor) -> bool:
    """Return whether the explicit backward is faster, by measurement: on CPU in bf16 up to length 512.

    Forward and backward of SDPA against the explicit backward, milliseconds, head_dim 64, Xeon with AMX:

        sequences x heads x length     1 thread          2 threads
        8 x 6 x 256                    22.9 -> 13.7      14.5 ->  9.1
        4 x 6 x 512                    33.5 -> 24.1      17.2 -> 14.4
        1 x 12 x 1024                  45.1 -> 40.3      22.8 -> 23.5
        in fp32, 8 x 6 x 256           24.6 -> 30.6
    """
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= 512


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    if window is not None and window < q.shape[2]:
        return _windowed(q, k, v, scale, window)
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_gradient and _explicit_backward_is_faster(q):
        return _ExplicitBackward.apply(unit_stride(q), unit_stride(k), unit_stride(v), scale)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    """Compute blocks of queries, each with the keys from its first query's window to its last query.

    Milliseconds forward and backward at length 2048, window 256, 8 heads of 64 in fp32: blocks of 128 to 256 take
    55-75, one call with a boolean mask 206-226, causal attention without a window 121-128.
    """
    length, blocks = q.shape[2], []
    for begin in range(0, length, QUERY_BLOCK):
        end, first = min(begin + QUERY_BLOCK, length), max(0, begin - window + 1)
        queries = torch.arange(begin, end, device=q.device)[:, None]
        keys = torch.arange(first, end, device=q.device)
        mask = (keys <= queries) & (keys > queries - window)
        block, grouped = (q[:, :, begin:end], k[:, :, first:end], v[:, :, first:end]), q.shape[1] != k.shape[1]
        blocks.append(F.scaled_dot_product_attention(*block, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return torch.cat(blocks, dim=2)


# Documents ----------------------------------------------------------------------------------------


def _by_document(q: Tensor, k: Tensor, v: Tensor, ctx: Documents, scale: float, window: int | None) -> Tensor:
    """Make one call per document. It only splits and concatenates, whose backward touches every element once."""
    assert ctx.cu_seqlens is not None
    lengths = document_lengths(ctx.cu_seqlens, q.shape[0], q.shape[2])
    if all(len(row) == 1 for row in lengths):
        return _causal(q, k, v, scale, window)
    rows = []
    for row, parts in zip(lengths, zip(q.split(1), k.split(1), v.split(1))):
        documents = zip(*(part.split(row, dim=2) for part in parts))
        rows.append(torch.cat([_causal(dq, dk, dv, scale, window) for dq, dk, dv in documents], dim=2))
    return torch.cat(rows)


def document_lengths(cu_seqlens: tuple[int, ...], sequences: int, length: int) -> list[list[int]]:
    """Return the document lengths of each sequence; a document that continues in the next sequence is cut there."""
    tokens = sequences * length
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens:
        raise ValueError(f"cu_seqlens runs from {cu_seqlens[0]} to {cu_seqlens[-1]}, expected 0 to {tokens}")
    borders = sorted({*cu_seqlens, *range(0, tokens, length)})
    rows: list[list[int]] = [[] for _ in range(sequences)]
    for begin, end in pairwise(borders):
        rows[begin // length].append(end - begin)
    return rows


# The explicit backward ----------------------------------------------------------------------------


class _ExplicitBackward(torch.autograd.Function):
    """Flash forward, which saves only q, k, v and one number per row; backward by batched matrix products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, lse = ctx.saved_tensors
        return *torch.ops.kenotron.causal_attention_backward(upstream[0], q, k, v, lse, ctx.scale), None


def _causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) for the output's gradient, a few heads at a time in buffers that stay in the cache.

    The probabilities P are recomputed from q and k: exp(scores - lse) in fp32, then divided by their own sum, because
    the scores are rounded to q's dtype and lse is not. Then dV = P^T dO, dP = dO V^T,
    dS = P (dP - rowsum(P dP)), dQ = scale dS K, dK = scale dS^T Q. The queries that share a key-value head
    are rows of one matrix, so the products sum over them.
    """
    sequences, heads, length, head_dim = q.shape
    pairs, group = sequences * k.shape[1], heads // k.shape[1]
    rows = (pairs, group * length, head_dim)
    q, grad = q.reshape(rows), grad.reshape(rows)
    k, v = k.reshape(pairs, length, head_dim), v.reshape(pairs, length, head_dim)
    minus_lse = lse.reshape(pairs, group * length, 1).neg()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    step = min(pairs, max(1, GROUP // (group * length * length)))
    wide = torch.empty(step, group * length, length, dtype=torch.float32)
    scores, probabilities = torch.empty(2, *wide.shape, dtype=q.dtype)
    for begin in range(0, pairs, step):
        part = slice(begin, min(begin + step, pairs))
        n = part.stop - begin
        s, p, e = scores[:n], probabilities[:n], wide[:n]
        e.copy_(torch.bmm(q[part], k[part].mT, out=s))
        torch.add(minus_lse[part], e, alpha=scale, out=e).exp_()
        e.view(n, group, length, length).tril_()
        p.copy_(e.div_(e.sum(-1, keepdim=True)))
        torch.bmm(p.mT, grad[part], out=dv[part])
        torch.bmm(grad[part], v[part].mT, out=s)
        ds = torch.ops.aten._softmax_backward_data.out(s, p, -1, p.dtype, grad_input=s)
        torch.bmm(ds, k[part], out=dq[part])
        torch.bmm(ds.mT, q[part], out=dk[part])
    kv_shape = (sequences, heads // group, length, head_dim)
    shapes = ((sequences, heads, length, head_dim), kv_shape, kv_shape)
    dq, dk, dv = (x.view(shape) for x, shape in zip((dq.mul_(scale), dk.mul_(scale), dv), shapes))
    return dq, dk, dv


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# A custom operator: torch.compile calls it as a whole instead of unrolling its loop. (torch.library.custom_op
# would do the same, but imports the compiler at its first call, 2 s.)
_library = torch.library.Library("kenotron", "FRAGMENT")
_library.define(
    "causal_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor lse, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
OPERATORS = {"causal_attention_backward": _causal_attention_backward}
_library.impl("causal_attention_backward", _causal_attention_backward, "CPU")
torch.library.register_fake("kenotron::causal_attention_backward", _fake_backward, lib=_library)
