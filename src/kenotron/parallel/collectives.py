"""Collectives that gradients flow through, each with its conjugate on the way back, visible in the autograd graph.

Two ranks; both hold all of the residual stream x (ALL_REDUCE), or half of its tokens each (REDUCE_SCATTER):

                                   forward                           backward
    `copy_to`         full   → full      nothing                 sum over ranks
    `reduce_from`     summands → full    sum over ranks          nothing
    `gather_tokens`   shard  → full      all-gather              reduce-scatter
    `scatter_tokens`  summands → shard   reduce-scatter          all-gather
    `unshard_tokens`  shard  → full      all-gather              keep this rank's tokens
    `unshard_columns` columns → full     all-gather, dim 1       keep this rank's columns
    `exchange_rows`   rows → rows        all-to-all              the same, the other way

After `gather_tokens` every rank computes something different with all tokens (its columns), and gradients add up; after
`unshard_tokens` all compute the same. The first two are f and g of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053,
figure 3), the next two g and its conjugate of sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198, figure
5); the last serves Ulysses and the experts. A group of None means one rank: nothing to do.

Below them, `start_sum`, `start_gather` and `start_reduce_scatter` return at once, and `finish` waits for what they
started: computation between the two overlaps with the communication. They are operators that torch.compile traces
(``torch.ops._c10d_functional``, which torch's functional collectives are built on), so a compiled block has no
graph break and the compiler may move the wait.

Between ranks of one machine, on CPUs, `parallel.shared_memory` replaces them. Nothing starts before `finish` then: the
sum of a gradient, amid backward, would wait for a rank that waits for this one in another group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.config.errors import InputError

Group = dist.ProcessGroup | None
Started = Callable[[], Tensor]  # what was started: for `finish`
OverRanks = Callable[[Tensor, dist.ProcessGroup], Tensor]

_ops = torch.ops._c10d_functional

in_memory: dict[str, Any] = {}
"""Group name → its `parallel.shared_memory.MemoryGroup`, where its ranks are on one machine: for tensors of the CPU."""


def start_sum(x: Tensor, group: dist.ProcessGroup) -> Started:
    """The sum of x over the ranks of `group`. x is consumed: its memory may become the sum's."""
    x = x.contiguous()
    if memory := memory_of(x, group):
        return partial(memory.sum, x)
    if torch.compiler.is_compiling():  # the compiler finds by itself what may be overwritten
        return partial(_ops.wait_tensor, _ops.all_reduce(x, "sum", group.group_name))
    return partial(_ops.wait_tensor, _ops.all_reduce_(x, "sum", group.group_name))


def start_gather(x: Tensor, group: dist.ProcessGroup) -> Started:
    """x ``[n, ...]`` of every rank, in rank order: ``[n * ranks, ...]``."""
    if memory := memory_of(x, group):
        return partial(memory.gather, x.contiguous())
    return partial(_ops.wait_tensor, _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Started:
    """This rank's rows ``[n / ranks, ...]`` of the sum of x ``[n, ...]`` over ranks.

    On CPU every rank receives the summands of its rows and adds them up: gloo's reduce-scatter sums all rows on all
    ranks. ``[2048, 384]`` fp32 on two ranks: 3.0 ms → 1.2.
    """
    x, ranks = x.contiguous(), group.size()
    if len(x) % ranks:
        raise InputError(
            f"parallelism.tp_mode: REDUCE_SCATTER: expected a multiple of tp {ranks} tokens, found {len(x)}"
        )
    if memory := memory_of(x, group):
        return partial(memory.reduce_scatter, x)
    if x.device.type != "cpu":
        return partial(_ops.wait_tensor, _ops.reduce_scatter_tensor(x, "sum", ranks, group.group_name))
    rows = [len(x) // ranks] * ranks
    summands = _ops.all_to_all_single(x, rows, rows, group.group_name)
    return lambda: _ops.wait_tensor(summands).unflatten(0, (ranks, -1)).sum(0)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """Begin to sum x in place; it is the sum when what this returns has been called. For gradients, during backward."""
    if memory := memory_of(x, group):
        return partial(memory.sum, x)
    return dist.all_reduce(x, group=group, async_op=True).wait


def memory_of(x: Tensor, group: dist.ProcessGroup) -> Any:
    """The `shared_memory.MemoryGroup` that replaces `group` for x, or None; compiled code has none."""
    inside = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return in_memory.get(group.group_name) if inside else None


def finish(started: Started) -> Tensor:
    """Wait for what a start_… began, and return it. To be called once."""
    return started()


class _Collective(torch.autograd.Function):
    """`there` of x over the ranks of `group`; on the way back, `back` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: OverRanks, back: OverRanks) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        return ctx.back(grad[0], ctx.group), None, None, None


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return finish(start_sum(x.clone(), group))


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return finish(start_gather(x, group))


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return finish(start_reduce_scatter(x, group))


def _own_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


def _gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return torch.cat(_gather(x, group).chunk(group.size()), 1)


def _own_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), 1)[group.rank()]


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        received = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        return _ExchangeRows.apply(grad[0], ctx.receive, ctx.send, ctx.group), None, None, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Identity; the gradients of all ranks of `group` are summed on the way back."""
    return x if group is None else _Collective.apply(x, group, _same, _sum)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the ranks of `group`; the gradient passes unchanged."""
    return x if group is None else _Collective.apply(x, group, _sum, _same)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """x ``[tokens / ranks, ...]`` → ``[tokens, ...]`` on every rank; back, every rank's gradients are summed."""
    return x if group is None else _Collective.apply(x, group, _gather, _reduce_scatter)


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Summands ``[tokens, ...]`` → this rank's ``[tokens / ranks, ...]`` of their sum."""
    return x if group is None else _Collective.apply(x, group, _reduce_scatter, _gather)


def unshard_tokens(x: Tensor, group: Group) -> Tensor:
    """x ``[tokens / ranks, ...]`` → ``[tokens, ...]``, with which every rank computes the same."""
    return x if group is None else _Collective.apply(x, group, _gather, _own_tokens)


def unshard_columns(x: Tensor, group: Group) -> Tensor:
    """x ``[tokens, columns / ranks]`` → ``[tokens, columns]``, with which every rank computes the same."""
    return x if group is None else _Collective.apply(x, group, _gather_columns, _own_columns)


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """x's rows, the first ``send[0]`` for rank 0, … → the rows from each rank, ``receive[r]`` of rank r."""
    return _ExchangeRows.apply(x, send, receive, group)


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """In place, no gradient: for statistics and losses."""
    if group is not None and op == dist.ReduceOp.SUM and (memory := memory_of(x, group)):
        memory.sum(x)
    elif group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x


def any_rank(flag: bool, world_size: int, device: torch.device) -> bool:
    """Whether `flag` is true on any rank of the run. All of them make the call; the host waits for the other hosts."""
    return flag if world_size == 1 else sum_over_ranks(int(flag), dist.group.WORLD, device) > 0


def sum_over_ranks(count: int, group: Group, device: torch.device) -> int:
    """The sum of `count` over the n ranks of `group`, on the host, which waits for the other hosts.

    The first rank adds up what all send it at once, and the result comes back in log2 n messages one after another.
    gloo's all_reduce takes 2 (n - 1) of them, in a ring: a tenth of a second for a thousand ranks, in every step.
    """
    if group is None:
        return count
    # On the CPU where the group has it too: the device, whose queue of work would be drained, is not asked then.
    total = torch.tensor(count, device="cpu" if "cpu" in dist.get_backend_config(group) else device)
    counts = total.new_empty(group.size())
    dist.gather(total, list(counts.unbind()) if group.rank() == 0 else None, group=group, group_dst=0)
    if group.rank() == 0:
        total = counts.sum()
    dist.broadcast(total, group=group, group_src=0)
    return int(total)
