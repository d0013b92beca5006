"""Context parallelism: ranks share every sequence, and only layers that mix tokens are affected.

Two ranks, one sequence of eight tokens (zig-zag chunks of two, so that causal work is equal: `parallel.cp_schedule`):

    tokens      7 8 9 2 5 2 6 4          rank 0   7 8 6 4   positions 0 1 6 7
                                         rank 1   9 2 5 2   positions 2 3 4 5

Norms, projections, MLPs and the loss work token by token, without communication. In attention a query needs the keys
and values of all tokens before it. There are three methods with one signature:

    ring        keys and values travel around the ring while the rank computes with those it has (`parallel.ring`)
    allgather   keys and values are gathered, their gradients summed back (`parallel.ring`)
    ulysses     an all-to-all turns "my tokens, all heads" into "all tokens, my heads" and back: contiguous chunks,
                the ordinary kernels, also sliding windows; heads must divide (DeepSpeed Ulysses, arXiv 2309.14509)

A recurrent layer (Mamba) needs the state after the preceding tokens: ``state_passing`` with contiguous chunks
(`parallel.state_passing`). Recurrent layers of a hybrid pass states as well, with ulysses' chunks, which are the same.

`shard` shards a micro-batch. Every rank has the gradients of its own tokens' losses, which `parallel.data` sums over
cp.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.config.parallelism import CONTIGUOUS_METHODS
from kenotron.kernels.attention import Borders, attention
from kenotron.models import Context, MicroBatch
from kenotron.parallel.collectives import Group, all_reduce, exchange_rows
from kenotron.parallel.cp_schedule import Chunks, contiguous, zigzag
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.ring import allgather_attention, ring_attention
from kenotron.parallel.state_passing import StatesOfRanks


def shard(micro_batch: MicroBatch, mesh: Mesh, method: str) -> MicroBatch:
    """Return this rank's tokens of every sequence, with an attention function over the full sequences.

    Labels and positions are sharded like tokens, ``ctx.shape`` is ``(sequences, local_length)``; ``ctx.cu_seqlens``
    still has the document borders in the full sequences, which this attention reads.
    """
    group = mesh.group("cp")
    if group is None:
        return micro_batch
    ctx = micro_batch.ctx
    sequences, length = ctx.shape
    chunks = local_chunks(length, mesh.degree("cp"), mesh.rank("cp"), method)

    def here(x: Tensor) -> Tensor:
        return cut(x.view(sequences, length), chunks).flatten()

    ctx = replace(
        ctx,
        shape=(sequences, length // mesh.degree("cp")),
        positions=here(ctx.positions),
        attention=shared_attention(group, method, ctx.attention),
        sum_over_sequence=partial(all_reduce, group=group),
        passing=StatesOfRanks(group) if method in CONTIGUOUS_METHODS else None,
    )
    labels = None if micro_batch.labels is None else here(micro_batch.labels)
    return MicroBatch(here(micro_batch.tokens), labels, ctx)


def local_chunks(length: int, degree: int, rank: int, method: str) -> Chunks:
    """Return (begin, end) of the chunks that `rank` holds of a sequence of `length` tokens."""
    parts = degree if method in CONTIGUOUS_METHODS else 2 * degree
    if length % parts:
        raise InputError(
            f"parallelism.context_parallel_size: {method} cuts a sequence into {parts} chunks; expected a length that "
            f"is a multiple of that, found {length}"
        )
    return contiguous(length, degree, rank) if method in CONTIGUOUS_METHODS else zigzag(length, degree, rank)


def cut(x: Tensor, chunks: Chunks, dim: int = 1) -> Tensor:
    """Return the chunks of x along `dim`, concatenated."""
    return torch.cat([x.narrow(dim, begin, end - begin) for begin, end in chunks], dim)


def shared_attention(
    group: dist.ProcessGroup, method: str, local: Callable[..., Tensor] = attention
) -> Callable[..., Tensor]:
    """Return ``ctx.attention`` for ranks of `group`; ulysses computes with `local`.

    A compiled block has a graph break here, because communication is not traced.
    """
    attend = METHODS[method]

    def shared(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        ctx: Context,
        layer: object = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(shared)(q, k, v, ctx, layer, scale, window)
        if attend is ulysses_attention:
            return attend(q, k, v, group, ctx.cu_seqlens, scale, window, local, ctx.document_starts)
        if window is not None:
            raise InputError(f"parallelism.context_parallel_method: a sliding window needs ulysses, found {method}")
        return attend(q, k, v, group, ctx.cu_seqlens, scale)

    return shared


# Ulysses ------------------------------------------------------------------------------------------


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    cu_seqlens: tuple[int, ...] | None = None,
    scale: float | None = None,
    window: int | None = None,
    local: Callable[..., Tensor] = attention,
    document_starts: Tensor | None = None,
) -> Tensor:
    """Compute causal attention over sequences that the ranks of `group` share, with two all-to-alls.

    q ``[sequences, heads, local_length, head_dim]``; k, v the same with kv_heads, a divisor of heads. A rank holds the
    `cp_schedule.contiguous` chunk of every sequence; heads must be a multiple of the ranks. Key-value heads that the
    ranks do not divide are repeated until they do, so that each rank gets those that its query heads read. Returns q's
    shape. Each rank computes with `local`; without a group, only `local` is called.
    """
    borders = Borders(cu_seqlens, document_starts)
    if group is None or group.size() == 1:
        return local(q, k, v, borders, scale=scale, window=window)
    ranks, heads, kv_heads = group.size(), q.shape[1], k.shape[1]
    if heads % ranks:
        raise InputError(
            f"parallelism.context_parallel_size: ulysses shares out the {heads} query heads of a rank "
            f"(num_attention_heads / tp); expected a divisor of that, found {ranks}; ring and allgather take any number"
        )
    copies = lcm(kv_heads, ranks) // kv_heads
    if copies > 1:
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    one_each = [1] * ranks
    by_rank = [x.unflatten(1, (ranks, -1)).movedim(1, 0) for x in (q, k, v)]  # [ranks, sequences, some heads, ...]
    mine = exchange_rows(torch.cat(by_rank, dim=2), one_each, one_each, group)
    whole = mine.movedim(0, 2).flatten(2, 3)  # the ranks' tokens side by side: [sequences, some heads, length, ...]
    q, k, v = whole.split([x.shape[2] for x in by_rank], dim=1)
    out = local(q, k, v, borders, scale=scale, window=window)
    back = exchange_rows(out.unflatten(2, (ranks, -1)).movedim(2, 0), one_each, one_each, group)
    return back.movedim(0, 1).flatten(1, 2)


def no_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Raise: with `state_passing`, layers have no attention."""
    raise InputError("parallelism.context_parallel_method: state_passing: this model has attention")


METHODS: dict[str, Callable[..., Tensor]] = {
    "state_passing": no_attention,
    "ring": ring_attention,
    "ulysses": ulysses_attention,
    "allgather": allgather_attention,
}
