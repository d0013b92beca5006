"""Weights in oneDNN's own order: decoding on a CPU reads each of them once per step, which is most of a step's time.

A step multiplies a few rows by every matrix of the model. `F.linear` takes the matrix as it lies in memory, which
costs 1.3 to 3 times the time of reading it; a matrix reordered once for such products takes little more than that
(benchmarks/decoding.py). Weights that are not trained can be kept so. The reordered ones take the place of the others;
a tied head has its own, for the embedding looks up rows.

The operators are private to torch (see `kernels.products`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kenotron.kernels.products import has_onednn, onednn
from kenotron.models.blocks.head import LMHead, bounded
from kenotron.models.blocks.linear import Linear
from kenotron.parallel.collectives import Group, all_reduce, unshard_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kenotron.models.context import Context
    from kenotron.models.decoder import Decoder

ROWS = 8  # of the products that the order is for: it is as good for one, and the order for one is slow for eight


def pack(model: Decoder) -> None:
    """Reorder the weights of the linears and the head of `model`, in place, where that can be done."""
    if not can_pack(next(model.parameters())):
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            replacement = _packed_form(child)
            if replacement is not None:
                setattr(module, name, replacement)


def _packed_form(module: nn.Module) -> nn.Module | None:
    """What takes the place of a linear or a head, whole or split over tp; None for other modules."""
    if type(module) is Linear:
        return PackedLinear(module.weight, module.bias)
    if type(module) is LMHead:
        return PackedHead(module.weight, module.vocab_size, module.softcap)
    if not isinstance(getattr(module, "weight", None), DTensor):
        return None
    from kenotron.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelHead
    from kenotron.parallel.tensor_labels import rows_here

    if type(module) is ColumnParallelLinear:
        bias = None if module.bias is None else rows_here(module.bias, module.rows)
        return PackedLinear(rows_here(module.weight, module.rows), bias)
    if type(module) is RowParallelLinear:
        bias = None if module.bias is None else rows_here(module.bias, None)
        return PackedRowParallel(rows_here(module.weight, None), bias, module.settings.group)
    if type(module) is VocabParallelHead:
        return PackedHead(rows_here(module.weight, None), module.vocab_size, module.softcap, module.settings.group)
    return None


def can_pack(weight: Tensor) -> bool:
    """Whether this torch multiplies packed weights of this dtype on this device."""
    if weight.device.type != "cpu" or not has_onednn() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or bf16


class PackedLinear(nn.Module):
    """A `Linear`, or a rank's columns of one; its weight is put in oneDNN's order when it is first used. Forward only.

    Those that are used together, as queries, keys and values are, become one matrix: a call costs as much as a small
    product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.widths: list[int] = []  # once it is packed, of the linears in it

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., in_features]`` → ``[..., out_features]``."""
        return self.grouped(x, self)[0]

    @staticmethod
    def grouped(x: Tensor, *linears: PackedLinear) -> tuple[Tensor, ...]:
        """See `Linear.grouped`."""
        first = linears[0]
        if not first.widths:
            first._take(linears)
        assert len(first.widths) == len(linears), "linears that are used together are always used together"
        y = onednn(x, first.weight, first.bias)
        return y.split(first.widths, dim=-1) if len(linears) > 1 else (y,)

    def _take(self, linears: Sequence[PackedLinear]) -> None:
        """Become all of `linears`, this one first, whose weights are freed."""
        self.widths = [linear.weight.shape[0] for linear in linears]
        weight = torch.cat([linear.weight for linear in linears])
        biases = [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in linears]
        bias = torch.cat(biases) if any(linear.bias is not None for linear in linears) else None
        for linear in linears:
            del linear.weight, linear.bias
        self.weight, self.bias = packed(weight), bias


class PackedRowParallel(nn.Module):
    """A row-parallel linear: x ``[tokens, in / tp]`` → the sum over the ranks of `group`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: Group) -> None:
        super().__init__()
        self.weight, self.bias, self.group = packed(weight), bias, group

    def forward(self, x: Tensor) -> Tensor:
        """x ``[tokens, in / tp]`` → ``[tokens, out]`` on every rank."""
        y = all_reduce(onednn(x, self.weight, None), self.group)
        return y if self.bias is None else y + self.bias


class PackedHead(nn.Module):
    """An `LMHead`, or a rank's rows of one; logits only."""

    def __init__(self, weight: Tensor, vocab_size: int, softcap: float | None, group: Group = None) -> None:
        super().__init__()
        self.weight, self.vocab_size, self.softcap, self.group = packed(weight), vocab_size, softcap, group

    def forward(self, hidden: Tensor, ctx: Context, labels: Tensor | None = None) -> Tensor:
        """Logits ``[logits_to_keep, vocab]``, of all ranks on every rank."""
        assert labels is None, "packed weights are for decoding"
        kept = hidden if ctx.logits_to_keep is None else hidden[ctx.logits_to_keep]
        logits = unshard_columns(onednn(kept, self.weight, None), self.group)[:, : self.vocab_size]
        return bounded(logits, self.softcap)


def packed(weight: Tensor) -> Tensor:
    """`weight` ``[out, in]`` in oneDNN's order."""
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return reordered
