"""The feed-forward of a mixture of experts: every token goes through the gated MLPs of its own experts.

    y[t] = sum over j of weights[t, j] * down[e] (act(gate[e] x[t]) * up[e] x[t])        e = experts[t, j]

Without a gate it is down[e] act(up[e] x[t]).

Tokens are sorted by expert, so each expert is three products of consecutive rows. Three tokens with two experts each:

    experts   [[2, 0], [0, 1], [2, 1]]          rows, sorted   0 0 │ 1 1 │ 2 2     expert
                                                               0 1 │ 1 2 │ 0 2     token

Backward saves only the rows of gate and up. A routing weight is applied inside the MLP, before `down`: then its
gradient is a dot product of tensors that backward has anyway, and no expert's output is saved.

On accelerators, products of rows grouped by expert use torch's `grouped_mm`, with group sizes on the device. Its rows
after the last group are uninitialized, so the groups cover all rows. On CPU, where the host has the sizes at once, a
loop over experts writes into slices of one buffer; a loop that indexes the weights under autograd would make a gradient
of all experts for each of them, 8 to 30 times slower.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels import products
from kenotron.kernels.fused import fused
from kenotron.kernels.products import rows_by_matrix, rows_by_rows
from kenotron.kernels.shortcuts import reads_are_free
from kenotron.kernels.swiglu import ACTIVATIONS
from kenotron.kernels.token_slots import sum_of_slots


def expert_mlp(
    x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, act: str = "silu"
) -> Tensor:
    """Apply the MLPs of each token's experts to x ``[tokens, hidden]``; return the same shape and dtype.

    experts ``[tokens, k]`` int64, weights ``[tokens, k]`` fp32; gate (None: there is none) and up
    ``[experts, width, hidden]``, down ``[experts, hidden, width]`` in x's dtype. `act` is a name of Hugging Face's
    `hidden_act`. A dropped slot has weight 0, and the number of experts as its expert.
    """
    if torch.compiler.is_compiling():  # group sizes depend on data: a compiled block has a graph break here
        return torch.compiler.disable(_ExpertMLP.apply)(x, experts, weights, gate, up, down, act)
    return _ExpertMLP.apply(x, experts, weights, gate, up, down, act)


def slots_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return slots sorted by expert, ``[tokens * k]``, and the number of slots of each of the `count` experts.

    It does not use `torch.bincount`, for which the host waits on a GPU: its result's length depends on the data.
    """
    ordered, order = torch.sort(experts.reshape(-1), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=experts.device), right=True)
    return order, ends.diff(prepend=ends.new_zeros(1))


def counts_on_host(counts: Tensor, total: int) -> Any:
    """Return ``counts.tolist()``; on the planner's tensors, which have no values, `total` in equal parts."""
    return counts.tolist()


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, experts: Tensor, weights: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, act: str
    ) -> Tensor:
        ctx.act, ctx.slots = act, experts.shape[1]
        order, counts = slots_by_expert(experts, up.shape[0] + 1)
        sizes, dropped = counts[:-1], counts[-1]  # dropped slots are the last of `order`
        if reads_are_free(sizes):
            order = order[: sum(counts_on_host(sizes, len(order)))]
        else:  # without waiting for counts: dropped slots are rows of the last expert, of weight 0
            sizes[-1] += dropped
        slot, w, at, room = _with_room(order, weights, sizes, x.dtype)
        groups, rows = _Groups(room), x.index_select(0, slot // ctx.slots)
        g = groups.rows_by_matrix(rows, up if gate is None else gate)
        u = None if gate is None else groups.rows_by_matrix(rows, up)
        y = groups.rows_by_matrix(_gate_and_weigh(g, u, w, act), down)
        ctx.save_for_backward(x, weights, gate, up, down, order, sizes, g, u)
        return sum_of_slots(y, order, x.shape[0], ctx.slots, at)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        x, weights, gate, up, down, order, sizes, g, u = ctx.saved_tensors
        slot, w, at, room = _with_room(order, weights, sizes, x.dtype)
        groups, tokens = _Groups(room), x.shape[0]
        dy, rows = (each.index_select(0, slot // ctx.slots) for each in (upstream[0], x))

        dhidden = groups.rows_by_matrix(dy, down.transpose(1, 2))
        dg, du, hidden, dw = _gate_and_weigh_backward(dhidden, g, u, w, ctx.act)
        ddown = groups.rows_by_rows(dy, hidden)
        if gate is None:
            dgate, dup = None, groups.rows_by_rows(dg, rows)
            drows = groups.rows_by_matrix(dg, up.transpose(1, 2))
        else:
            dgate, dup = groups.rows_by_rows(dg, rows), groups.rows_by_rows(du, rows)
            drows = groups.rows_by_matrix(dg, gate.transpose(1, 2))
            groups.rows_by_matrix(du, up.transpose(1, 2), onto=drows)
        dx = sum_of_slots(drows, order, tokens, ctx.slots, at)
        dweights = sum_of_slots(dw[:, None], order, weights.numel(), 1, at).view_as(weights)
        return dx, None, dweights.to(weights.dtype), dgate, dup, ddown, None


def _with_room(order: Tensor, weights: Tensor, sizes: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the slot of each row, its routing weight ``[rows, 1]``, the row of each slot, and each expert's rows.

    With oneDNN, an expert's rows are padded by up to an eighth, with weight 0: for each new number of rows oneDNN
    compiles a kernel in 0.4 ms, four times the time of a product of 256 rows in bf16, and routing keeps producing new
    numbers. Eight sizes between powers of two fit its cache. Without oneDNN, the third result is None.
    """
    w = weights.reshape(-1).index_select(0, order).to(dtype)
    if not reads_are_free(sizes):  # `grouped_mm` reads sizes on the device
        return order, w[:, None], None, sizes
    counts = counts_on_host(sizes, len(order))
    if not (dtype.itemsize == 2 or (products.ONEDNN and dtype == torch.float32)):
        return order, w[:, None], None, counts
    room = [count + -count % max(16, 1 << max(count.bit_length() - 4, 0)) for count in counts]
    more = torch.tensor(room) - sizes
    before = more.cumsum(0) - more
    at = torch.arange(len(order)) + before.repeat_interleave(sizes, output_size=len(order))
    slot, w = (each.new_zeros(sum(room)).index_copy_(0, at, each) for each in (order, w))
    return slot, w[:, None], at, room


def _gate_and_weigh(g: Tensor, u: Tensor | None, w: Tensor, act: str) -> Tensor:
    """Return ``act(g) * u * w``, the rows that `down` multiplies; ``act(g) * w`` without a gate."""
    if kernel := _in_triton("gate_and_weigh", g, u, act):
        return kernel(g, u, w)
    hidden = ACTIVATIONS[act].plain(g)
    return (hidden if u is None else hidden.mul_(u)).mul_(w)


def _gate_and_weigh_backward(d: Tensor, g: Tensor, u: Tensor | None, w: Tensor, act: str) -> Any:
    """Return dg, du (None without a gate), ``act(g) * u * w`` and dw ``[rows]`` fp32; overwrite the gradient d."""
    if kernel := _in_triton("gate_and_weigh_backward", g, u, act):
        return kernel(d, g, u, w)
    activated, dg, du = ACTIVATIONS[act].plain(g), torch.empty_like(g), None
    product = activated if u is None else activated * u
    dw = (d * product).sum(1, dtype=torch.float32)
    d.mul_(w)
    if u is not None:
        du = activated.mul_(d)
        d.mul_(u)
    ACTIVATIONS[act].backward(d, g, grad_input=dg)
    return dg, du, product.mul_(w), dw


def _in_triton(name: str, g: Tensor, u: Tensor | None, act: str) -> Callable[..., Any] | None:
    gated = u is not None and ACTIVATIONS[act].plain is F.silu
    return fused(f"experts.{name}", g) if gated else None


class _Groups:
    """Groups of consecutive rows, one per expert, and the matrix products of such rows."""

    def __init__(self, sizes: Tensor | list[int]) -> None:
        if isinstance(sizes, list):
            self.sizes, self.ends = sizes, None
            return
        self.ends = sizes.cumsum(0).to(torch.int32)
        zeros = sizes.is_cuda and torch.cuda.get_device_capability() == (9, 0)  # else torch's issue 172439: any number
        self.empty = None if zeros else (sizes == 0)[:, None, None]

    def rows_by_matrix(self, x: Tensor, matrices: Tensor, onto: Tensor | None = None) -> Tensor:
        """Return x_i M_i^T ``[rows, out]`` for x ``[rows, in]``, matrices ``[groups, out, in]``, added to `onto`."""
        if self.ends is not None:
            y = F.grouped_mm(x, matrices.transpose(1, 2), offs=self.ends)
            return y if onto is None else onto.add_(y)
        y = x.new_empty(x.shape[0], matrices.shape[1]) if onto is None else onto
        for x_i, matrix, y_i in zip(x.split(self.sizes), matrices.unbind(), y.split(self.sizes)):
            if len(x_i):
                product = rows_by_matrix(x_i, matrix, out=y_i, onto=None if onto is None else y_i)
                if product is not y_i:
                    y_i.copy_(product)
        return y

    def rows_by_rows(self, y: Tensor, x: Tensor) -> Tensor:
        """Return y_i^T x_i ``[groups, out, in]`` for y ``[rows, out]``, x ``[rows, in]``; zeros for empty groups."""
        if self.ends is not None:
            found = F.grouped_mm(y.t(), x, offs=self.ends)
            return found if self.empty is None else found.masked_fill_(self.empty, 0)
        found = x.new_empty(len(self.sizes), y.shape[1], x.shape[1])
        for y_i, x_i, product in zip(y.split(self.sizes), x.split(self.sizes), found.unbind()):
            rows_by_rows(y_i, x_i, out=product) if len(x_i) else product.zero_()
        return found
