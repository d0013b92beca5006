"""Ulysses attention: an all-to-all turns "my tokens, all heads" into "all tokens, my heads", and back.

Ranks hold contiguous chunks of every sequence and compute with the ordinary kernels, also with sliding windows; the
heads must divide (DeepSpeed Ulysses, arXiv 2309.14509).
"""

from collections.abc import Callable
from math import lcm

import torch
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.kernels.attention import Borders, attention
from kenotron.parallel.collectives import Group, exchange_rows


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
