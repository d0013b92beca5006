"""Copy tokens to rows for their experts and sum them back; `Spread` and `Collect` are each other's transpose.

A token with k experts has k slots; `order` lists the slots of all tokens, sorted by expert. A token's slots are summed
in a fixed order, unlike with ``index_add`` of the rows. Slots that are not listed are dropped: they have no row and
contribute nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels.fused import fused


def sum_of_slots(rows: Tensor, order: Tensor, tokens: int, slots: int, at: Tensor | None = None) -> Tensor:
    """Return the sum over each token's slots, ``[tokens, features]``, of rows in sorted order, in a fixed order.

    `at`: the row of each slot of `order`, if there are other rows in between; None: there are none. On a CPU it uses
    bags of rows, which are read once without a copy: ``[16384, 512]`` fp32 in bags of 8 take 0.9 ms, and 4.3 if the
    rows are sorted by slot first.
    """
    if slots > 1 and (kernel := fused("experts.sum_of_slots", rows)):
        return kernel(rows, order, tokens, slots)
    complete = len(order) == tokens * slots
    if complete and rows.device.type == "cpu" and slots > 1:
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order)) if at is None else at
        return F.embedding_bag(places.view(tokens, slots), rows, mode="sum")
    rows = rows if at is None else rows.index_select(0, at)
    back = torch.empty_like(rows) if complete else rows.new_zeros(tokens * slots, rows.shape[1])
    back.index_copy_(0, order, rows)
    return back if slots == 1 else back.view(tokens, slots, -1).sum(1)


class Spread(torch.autograd.Function):
    """Copies x ``[tokens, features]`` to a row for each slot in `order`; backward sums the rows of a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, slots: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.tokens, ctx.slots = x.shape[0], slots
        return x.index_select(0, order // slots)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return sum_of_slots(upstream[0].contiguous(), order, ctx.tokens, ctx.slots), None, None


class Collect(torch.autograd.Function):
    """Sums rows in `order` by token to ``[tokens, features]``; backward copies them to slots."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, tokens: int, slots: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.slots = slots
        return sum_of_slots(rows, order, tokens, slots)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return upstream[0].index_select(0, order // ctx.slots), None, None, None
