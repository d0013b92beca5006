"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values are sent around the ring, queries stay.

Each of three ranks has a third of every sequence (in zig-zag chunks, `parallel.cp_schedule`). While a rank computes
with its current keys and values, they are already being sent to the next rank:

    step        0         1         2
    rank 0      kv 0      kv 2      kv 1        outputs are merged by log-sum-exp (kernels.blockwise_attention)
    rank 1      kv 1      kv 0      kv 2
    rank 2      kv 2      kv 1      kv 0

Backward is a second ring: k and v are sent again, followed one rank behind by the sum of their gradients in fp32, until
it reaches their owner. A layer keeps only its own tokens: q, k, v, the output and one number per query.

`allgather_attention` does the same work in one step (as Llama 3 was trained, arXiv 2407.21783, section 3.3.2): all keys
and values are gathered while the rank computes with its own; a reduce-scatter sums their gradients.

Both are functions of local tensors, which you can use in any module.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.kernels.attention import Borders, attention
from kenotron.kernels.blockwise_attention import block_attention, block_backward, merge_
from kenotron.kernels.shortcuts import unit_stride
from kenotron.parallel.collectives import Group, finish, start_gather, start_reduce_scatter
from kenotron.parallel.cp_schedule import Chunks, ScoreBlock, earlier_blocks, local_blocks, zigzag

Documents = tuple[int, ...] | None  # cu_seqlens
KEYS_AND_VALUES, THEIR_GRADIENTS = 1, 2  # tags of messages (for gloo; NCCL keeps the order of posting)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, cu_seqlens: Documents = None, scale: float | None = None
) -> Tensor:
    """Compute causal attention over sequences that the ranks of `group` share, by a ring of sends.

    q ``[sequences, heads, local_length, head_dim]``; k, v the same with kv_heads, a divisor of heads. A rank holds the
    `cp_schedule.zigzag` chunks of every sequence. `cu_seqlens` are the flat document borders of the full sequences;
    None: one document each. `scale` is ``head_dim ** -0.5`` by default. Returns q's shape. Without a group this is
    `kernels.attention`.
    """
    if group is None or group.size() == 1:
        return attention(q, k, v, Borders(cu_seqlens), scale=scale)
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    return _Ring.apply(q, k, v, group, cu_seqlens, q.shape[-1] ** -0.5 if scale is None else scale)


def allgather_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, cu_seqlens: Documents = None, scale: float | None = None
) -> Tensor:
    """Compute the same as `ring_attention`, with all keys and values gathered at once."""
    if group is None or group.size() == 1:
        return attention(q, k, v, Borders(cu_seqlens), scale=scale)
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    return _AllGather.apply(q, k, v, group, cu_seqlens, q.shape[-1] ** -0.5 if scale is None else scale)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, cu_seqlens: Documents, scale: float
    ) -> Tensor:
        own, earlier = _steps(q, group, cu_seqlens)
        kv = torch.stack((k, v))
        under_way = send_on(kv, group, KEYS_AND_VALUES)
        out, lse = _own_forward(q, k, v, own, scale)
        _earlier_forward(out, lse, q, kv, earlier[0], scale)
        for step in range(1, len(earlier)):
            kv = arrived(under_way)
            if step + 1 < len(earlier):
                under_way = send_on(kv, group, KEYS_AND_VALUES)
            _earlier_forward(out, lse, q, kv, earlier[step], scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.cu_seqlens, ctx.scale = group, cu_seqlens, scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        own, earlier = _steps(q, ctx.group, ctx.cu_seqlens)
        kv = torch.stack((k, v))
        under_way = send_on(kv, ctx.group, KEYS_AND_VALUES)
        saved = (unit_stride(upstream[0]), q, out, lse)
        dq, dkv = _own_backward(saved, k, v, own, ctx.scale)
        _add(dkv, _earlier_backward(dq, saved, kv, earlier[0], ctx.scale))
        behind = None
        for step in range(1, len(earlier)):
            kv = arrived(under_way)
            if step + 1 < len(earlier):
                under_way = send_on(kv, ctx.group, KEYS_AND_VALUES)
            shares = _earlier_backward(dq, saved, kv, earlier[step], ctx.scale)
            travelling = torch.zeros_like(dkv) if behind is None else arrived(behind)
            _add(travelling, shares)
            behind = send_on(travelling, ctx.group, THEIR_GRADIENTS)
        dkv += arrived(behind)
        dk, dv = dkv.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, cu_seqlens: Documents, scale: float
    ) -> Tensor:
        own, (earlier,) = _steps(q, group, cu_seqlens, gathered=True)
        under_way = start_gather(torch.stack((k, v)), group)
        out, lse = _own_forward(q, k, v, own, scale)
        gathered = _in_order(finish(under_way), group.size())
        _earlier_forward(out, lse, q, gathered, earlier, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.cu_seqlens, ctx.scale = group, cu_seqlens, scale
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        own, (earlier,) = _steps(q, ctx.group, ctx.cu_seqlens, gathered=True)
        under_way = start_gather(torch.stack((k, v)), ctx.group)  # again: keeping it would store the full sequence
        saved = (unit_stride(upstream[0]), q, out, lse)
        dq, dkv = _own_backward(saved, k, v, own, ctx.scale)
        gathered = _in_order(finish(under_way), ctx.group.size())
        gradients = torch.zeros_like(gathered, dtype=dkv.dtype)
        _add(gradients, _earlier_backward(dq, saved, gathered, earlier, ctx.scale))
        dkv += finish(start_reduce_scatter(_by_rank(gradients, ctx.group.size()), ctx.group))
        dk, dv = dkv.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


# Communication ------------------------------------------------------------------------------------


class UnderWay(NamedTuple):
    """A message to the next rank and one from the previous, both in flight; tensors must live until they arrive."""

    sent: Tensor
    received: Tensor
    works: Sequence[dist.Work]


def send_on(x: Tensor, group: dist.ProcessGroup, tag: int) -> UnderWay:
    """Start to send x to the next rank of `group` and to receive the previous rank's, asynchronously."""
    rank, degree = group.rank(), group.size()
    received = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=(rank + 1) % degree)
    receive = dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - 1) % degree)
    return UnderWay(x, received, dist.batch_isend_irecv([send, receive]))


def arrived(message: UnderWay | None) -> Tensor:
    """Wait for both directions of `message`, and return the received tensor."""
    assert message is not None
    for work in message.works:
        work.wait()
    return message.received


def _in_order(gathered: Tensor, ranks: int) -> Tensor:
    """Reorder ``[2 * ranks, ...]``, by rank and in zig-zag, to ``[2, ...]`` in the order of the sequence.

    This is all first chunks forwards, then all second ones backwards.
    """
    first, second = gathered.unflatten(0, (ranks, 2)).chunk(2, dim=-2)
    return torch.cat((*first.unbind(0), *reversed(second.unbind(0))), dim=-2)


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Invert `_in_order`."""
    chunks = x.chunk(2 * ranks, dim=-2)
    return torch.cat([torch.cat((chunks[r], chunks[-1 - r]), dim=-2) for r in range(ranks)])


# Computation --------------------------------------------------------------------------------------

Saved = tuple[Tensor, Tensor, Tensor, Tensor]  # the output's gradient, q, the output, its log-sum-exp
Shares = list[tuple[ScoreBlock, Tensor, Tensor]]  # each block's contributions to the gradients of its keys and values


def _steps(
    q: Tensor, group: dist.ProcessGroup, cu_seqlens: Documents, gathered: bool = False
) -> tuple[list[ScoreBlock], list[list[ScoreBlock]]]:
    """Return the blocks of the chunks with themselves, and for each step the blocks with earlier keys of that step.

    In each step of the ring the keys are another rank's; with `gathered`, a single step has the full sequence.
    """
    rank, degree = group.rank(), group.size()
    sequences, length = q.shape[0], q.shape[2] * degree
    chunks = zigzag(length, degree, rank)
    sources: list[Chunks] = [((0, length),)]
    if not gathered:
        sources = [zigzag(length, degree, (rank - step) % degree) for step in range(degree)]
    earlier = [earlier_blocks(chunks, source, sequences, length, cu_seqlens) for source in sources]
    return local_blocks(chunks, sequences, length, cu_seqlens), earlier


def _own_forward(q: Tensor, k: Tensor, v: Tensor, blocks: list[ScoreBlock], scale: float) -> tuple[Tensor, Tensor]:
    """Return (out, lse) in fp32 of the rank's own blocks, which cover every query once."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q, dtype=dtype), q.new_empty(q.shape[:3], dtype=dtype)
    for t in blocks:
        part, part_lse = block_attention(q[t.rows, :, t.q], k[t.rows, :, t.k], v[t.rows, :, t.k], t.causal, scale)
        out[t.rows, :, t.q], lse[t.rows, :, t.q] = part, part_lse
    return out, lse


def _earlier_forward(out: Tensor, lse: Tensor, q: Tensor, kv: Tensor, blocks: list[ScoreBlock], scale: float) -> None:
    k, v = kv
    for t in blocks:
        part, part_lse = block_attention(q[t.rows, :, t.q], k[t.rows, :, t.k], v[t.rows, :, t.k], t.causal, scale)
        merge_(out[t.rows, :, t.q], lse[t.rows, :, t.q], part, part_lse)


def _own_backward(saved: Saved, k: Tensor, v: Tensor, blocks: list[ScoreBlock], scale: float) -> tuple[Tensor, Tensor]:
    """Return (dq, [dk, dv]) in fp32 of the rank's own blocks, which cover every query and every key once."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    dq = torch.empty_like(saved[1], dtype=dtype)
    dkv = k.new_empty(2, *k.shape, dtype=dtype)
    for t in blocks:
        dq[t.rows, :, t.q], dkv[0, t.rows, :, t.k], dkv[1, t.rows, :, t.k] = _backward(saved, k, v, t, scale)
    return dq, dkv


def _earlier_backward(dq: Tensor, saved: Saved, kv: Tensor, blocks: list[ScoreBlock], scale: float) -> Shares:
    """Add to dq, and return the blocks' contributions to the gradients of `kv`, whose sum may still be in flight."""
    shares = []
    for t in blocks:
        block_dq, dk, dv = _backward(saved, kv[0], kv[1], t, scale)
        dq[t.rows, :, t.q] += block_dq
        shares.append((t, dk, dv))
    return shares


def _backward(saved: Saved, k: Tensor, v: Tensor, t: ScoreBlock, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, out, lse = (x[t.rows, :, t.q] for x in saved)
    return block_backward(grad, q, k[t.rows, :, t.k], v[t.rows, :, t.k], out, lse, t.causal, scale)


def _add(dkv: Tensor, shares: Shares) -> None:
    for t, dk, dv in shares:
        dkv[0, t.rows, :, t.k] += dk
        dkv[1, t.rows, :, t.k] += dv
