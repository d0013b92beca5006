"""Collectives as autograd functions; the backward of each is its conjugate collective.

Two ranks both hold all of the residual stream x (ALL_REDUCE), or half of its tokens each (REDUCE_SCATTER):

                                   forward                           backward
    `copy_to`         full   → full      nothing                 sum over ranks
    `reduce_from`     summands → full    sum over ranks          nothing
    `gather_tokens`   shard  → full      all-gather              reduce-scatter
    `scatter_tokens`  summands → shard   reduce-scatter          all-gather
    `unshard_tokens`  shard  → full      all-gather              keep this rank's tokens
    `unshard_columns` columns → full     all-gather, dim 1       keep this rank's columns
    `exchange_rows`   rows → rows        all-to-all              the reverse all-to-all

After `gather_tokens` every rank computes something different with all tokens (its columns), so gradients are summed;
after `unshard_tokens` all compute the same. The first two are f and g of Megatron-LM (Shoeybi et al. 2019, arXiv
1909.08053, figure 3), the next two g and its conjugate of sequence parallelism (Korthikanti et al. 2022, arXiv
2205.05198, figure 5); the last is for Ulysses and experts. A group of None means one rank, with nothing to do.

The functions `start_sum`, `start_gather` and `start_reduce_scatter` return at once, and `finish` waits for their
result, so computation between the two overlaps with the communication. They are operators that torch.compile traces
(``torch.ops._c10d_functional``, which torch's functional collectives are built on), so a compiled block has no graph
break and the compiler may move the wait.

Between ranks of one machine, on CPUs, `parallel.shared_memory` replaces them. Then the work starts only in `finish`:
otherwise the sum of a gradient during backward could wait for a rank that waits for this one in another group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.config.errors import InputError

Group = dist.ProcessGroup | None
Started = Callable[[], Tensor]  # waits and returns the result: for `finish`
OverRanks = Callable[[Tensor, dist.ProcessGroup], Tensor]

_ops = torch.ops._c10d_functional

in_memory: dict[str, Any] = {}
"""Group name → its `parallel.shared_memory.MemoryGroup`, for CPU tensors of groups on one machine."""


def start_sum(x: Tensor, group: dist.ProcessGroup) -> Started:
    """Start to sum x over the ranks of `group`. x must not be used afterwards: its memory may be overwritten."""
    x = x.contiguous()
    if memory := memory_of(x, group):
        return partial(memory.sum, x)
    if torch.compiler.is_compiling():  # the compiler decides itself what may be overwritten
        return partial(_ops.wait_tensor, _ops.all_reduce(x, "sum", group.group_name))
    return partial(_ops.wait_tensor, _ops.all_reduce_(x, "sum", group.group_name))


def start_gather(x: Tensor, group: dist.ProcessGroup) -> Started:
    """Start to gather x ``[n, ...]`` of every rank, in rank order, as ``[n * ranks, ...]``."""
    if memory := memory_of(x, group):
        return partial(memory.gather, x.contiguous())
    return partial(_ops.wait_tensor, _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Started:
    """Start to compute this rank's rows ``[n / ranks, ...]`` of the sum of x ``[n, ...]`` over ranks.

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
    """Start to sum x in place, for gradients during backward; the returned function waits until x is the sum."""
    if memory := memory_of(x, group):
        return partial(memory.sum, x)
    return dist.all_reduce(x, group=group, async_op=True).wait


def memory_of(x: Tensor, group: dist.ProcessGroup) -> Any:
    """Return the `shared_memory.MemoryGroup` that replaces `group` for x, or None, as in compiled code."""
    inside = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return in_memory.get(group.group_name) if inside else None


def finish(started: Started) -> Tensor:
    """Wait for a collective that a start_… began, and return its result. Call it once."""
    return started()


class _Collective(torch.autograd.Function):
    """Applies `there` to x over the ranks of `group`, and in backward `back` to the gradient."""

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
    return _sum_into(x.clone(), group)


def _sum_into(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return finish(start_sum(x, group))


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
    """Return x; backward sums the gradients of all ranks of `group`."""
    return x if group is None else _Collective.apply(x, group, _same, _sum)


def reduce_from(x: Tensor, group: Group, overwrite: bool = False) -> Tensor:
    """Return the sum of x over the ranks of `group`, in x's memory if `overwrite`; the gradient passes unchanged."""
    return x if group is None else _Collective.apply(x, group, _sum_into if overwrite else _sum, _same)


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Gather x ``[tokens / ranks, ...]`` to ``[tokens, ...]`` on every rank; backward sums all ranks' gradients."""
    return x if group is None else _Collective.apply(x, group, _gather, _reduce_scatter)


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Return this rank's ``[tokens / ranks, ...]`` of the sum of all ranks' x ``[tokens, ...]``."""
    return x if group is None else _Collective.apply(x, group, _reduce_scatter, _gather)


def unshard_tokens(x: Tensor, group: Group) -> Tensor:
    """Gather x ``[tokens / ranks, ...]`` to ``[tokens, ...]``, with which every rank must compute the same."""
    return x if group is None else _Collective.apply(x, group, _gather, _own_tokens)


def unshard_columns(x: Tensor, group: Group) -> Tensor:
    """Gather x ``[tokens, columns / ranks]`` to ``[tokens, columns]``, with which all ranks must compute the same."""
    return x if group is None else _Collective.apply(x, group, _gather_columns, _own_columns)


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first ``send[0]`` rows of x to rank 0, and so on; return the ``receive[r]`` rows from each rank r."""
    return _ExchangeRows.apply(x, send, receive, group)


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce x in place without a gradient, for statistics and losses."""
    if group is not None and op == dist.ReduceOp.SUM and (memory := memory_of(x, group)):
        memory.sum(x)
    elif group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x


def any_rank(flag: bool, world_size: int, device: torch.device) -> bool:
    """Return whether `flag` is true on any rank of the run. All ranks call it; the host waits for the other hosts."""
    return flag if world_size == 1 else sum_over_ranks(int(flag), dist.group.WORLD, device) > 0


def sum_over_ranks(count: int, group: Group, device: torch.device) -> int:
    """Return the sum of `count` over the n ranks of `group`, on the host, which waits for the other hosts.

    All ranks send to the first at once, and the result is broadcast in log2 n rounds. gloo's all_reduce takes 2 (n - 1)
    messages in a ring: a tenth of a second for a thousand ranks, in every step.
    """
    if group is None:
        return count
    # On the CPU if the group supports it: on the device, the sum would wait for all queued work.
    total = torch.tensor(count, device="cpu" if "cpu" in dist.get_backend_config(group) else device)
    counts = total.new_empty(group.size())
    dist.gather(total, list(counts.unbind()) if group.rank() == 0 else None, group=group, group_dst=0)
    if group.rank() == 0:
        total = counts.sum()
    dist.broadcast(total, group=group, group_src=0)
    return int(total)
