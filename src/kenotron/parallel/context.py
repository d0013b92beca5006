"""Context parallelism: ranks share every sequence, and only layers that mix tokens are affected.

Two ranks, one sequence of eight tokens (zig-zag chunks of two, so that causal work is equal: `parallel.cp_schedule`):

    tokens      7 8 9 2 5 2 6 4          rank 0   7 8 6 4   positions 0 1 6 7
                                         rank 1   9 2 5 2   positions 2 3 4 5

Norms, projections, MLPs and the loss work token by token, without communication. In attention a query needs the keys
and values of all tokens before it. There are three methods with one signature:

    ring        keys and values travel around the ring while the rank computes with those it has (`parallel.ring`)
    allgather   keys and values are gathered, their gradients summed back (`parallel.ring`)
    ulysses     an all-to-all turns "my tokens, all heads" into "all tokens, my heads" (`parallel.ulysses`)

A recurrent layer (Mamba) needs the state after the preceding tokens: ``state_passing`` with contiguous chunks
(`parallel.state_passing`). Recurrent layers of a hybrid pass states as well, with ulysses' chunks, which are the same.

`shard` shards a micro-batch. Every rank has the gradients of its own tokens' losses, which `parallel.data` sums over
cp.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.config.parallelism import CONTIGUOUS_METHODS
from kenotron.kernels.attention import attention
from kenotron.models import Context, MicroBatch
from kenotron.parallel.collectives import all_reduce
from kenotron.parallel.cp_schedule import Chunks, contiguous, zigzag
from kenotron.parallel.mesh import Mesh
from kenotron.parallel.state_passing import StatesOfRanks

METHODS = {
    "state_passing": "kenotron.parallel.state_passing.no_attention",
    "ring": "kenotron.parallel.ring.ring_attention",
    "allgather": "kenotron.parallel.ring.allgather_attention",
    "ulysses": "kenotron.parallel.ulysses.ulysses_attention",
}
KEY = "parallelism.context_parallel_method"


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


@cache
def attention_of(method: str) -> Callable[..., Tensor]:
    """Return a method's attention function, a function of the rank's q, k and v, and its group."""
    return import_dotted(METHODS[method], KEY)


def shared_attention(
    group: dist.ProcessGroup, method: str, local: Callable[..., Tensor] = attention
) -> Callable[..., Tensor]:
    """Return ``ctx.attention`` for ranks of `group`; ulysses computes with `local`.

    A compiled block has a graph break here, because communication is not traced.
    """
    attend = attention_of(method)

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
        if method == "ulysses":
            return attend(q, k, v, group, ctx.cu_seqlens, scale, window, local, ctx.document_starts)
        if window is not None:
            raise InputError(f"{KEY}: a sliding window needs ulysses, found {method}")
        return attend(q, k, v, group, ctx.cu_seqlens, scale)

    return shared
