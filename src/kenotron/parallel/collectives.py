"""The two conjugate collectives of tensor parallelism, visible in the autograd graph.

    region enters a split layer:   forward identity,   backward all-reduce      (`copy_to`)
    region leaves a split layer:   forward all-reduce, backward identity        (`reduce_from`)

f and g of Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, figure 3). A group of None means one rank: nothing to do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def copy_to(x: Tensor, group: Group) -> Tensor:
    """Identity; the gradients of all ranks of `group` are summed on the way back."""
    return x if group is None else _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: Group) -> Tensor:
    """The sum of x over the ranks of `group`; the gradient passes unchanged."""
    return x if group is None else _ReduceFrom.apply(x, group)


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """In place, no gradient: for statistics and losses."""
    if group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x
