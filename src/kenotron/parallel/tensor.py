"""Tensor parallelism: a linear layer's matrix split over ranks, with its collectives in sight.

    x ──copy_to──▶ [ W_q ] ▶ attention ▶ [ W_o ] ──reduce_from──▶ y        one all-reduce forward, one backward
                  columns                 rows

Column-parallel layers hold some of the output features, row-parallel ones some of the input features, so the pair needs
one sum (Shoeybi et al. 2019, arXiv 1909.08053). The parameters are DTensors as labels only, so that FSDP2, checkpoints
and clipping know what they are; the maths runs on local tensors.

`apply` swaps the modules that a plan names. Whole layouts (sequence shards, overlap) are built on this seam later.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.models import Context, LanguageModel, Plan
from kenotron.models.plan import modules
from kenotron.parallel.collectives import all_reduce, copy_to, reduce_from
from kenotron.parallel.mesh import Mesh


def apply(model: LanguageModel, plan: Plan, mesh: Mesh) -> None:
    """Swap every module that `plan` splits for its parallel twin; at tp 1 nothing changes."""
    if mesh.degree("tp") == 1:
        return
    plan.check(model)
    for kind, patterns in (("column", plan.column), ("row", plan.row), ("vocab", plan.vocab)):
        for pattern in patterns:
            for name, module in modules(model, pattern):
                _replace(model, name, _twin(kind, module, mesh))
    model.tie_weights()


def _twin(kind: str, module: nn.Module, mesh: Mesh) -> nn.Module:
    if kind == "column":
        return ColumnParallelLinear(module, mesh)
    if kind == "row":
        return RowParallelLinear(module, mesh)
    return VocabParallelHead(module, mesh) if hasattr(module, "vocab_size") else VocabParallelEmbedding(module, mesh)


def _replace(model: nn.Module, name: str, twin: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, twin)


def _split(parameter: Tensor, mesh: Mesh, dim: int) -> nn.Parameter:
    """An empty parameter of this rank's block along `dim`, labelled with where it belongs."""
    degree = mesh.degree("tp")
    if parameter.shape[dim] % degree:
        raise InputError(
            f"parallelism.tp: {parameter.shape[dim]} rows or columns of a weight cannot be split over tp {degree}"
        )
    shape = list(parameter.shape)
    shape[dim] //= degree
    local = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(DTensor.from_local(local, _tp_mesh(mesh), [Shard(dim)], run_check=False))


def _replicated(parameter: Tensor, mesh: Mesh) -> nn.Parameter:
    local = torch.empty_like(parameter)
    return nn.Parameter(DTensor.from_local(local, _tp_mesh(mesh), [Replicate()], run_check=False))


def _tp_mesh(mesh: Mesh) -> dist.DeviceMesh:
    assert mesh.device_mesh is not None
    return mesh.device_mesh["tp"]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ColumnParallelLinear(nn.Module):
    """Holds ``out_features / tp`` rows of W: x ``[tokens, in]`` whole on every rank → ``[tokens, out / tp]``."""

    def __init__(self, linear: Any, mesh: Mesh) -> None:
        super().__init__()
        self.group = mesh.group("tp")
        self.weight = _split(linear.weight, mesh, 0)
        self.bias = None if linear.bias is None else _split(linear.bias, mesh, 0)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else _local(self.bias).to(x.dtype)
        return F.linear(copy_to(x, self.group), _local(self.weight).to(x.dtype), bias)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return 2.0 * self.weight.numel()


class RowParallelLinear(nn.Module):
    """Holds ``in_features / tp`` columns of W: x ``[tokens, in / tp]`` → the sum ``[tokens, out]`` on every rank."""

    def __init__(self, linear: Any, mesh: Mesh) -> None:
        super().__init__()
        self.group = mesh.group("tp")
        self.weight = _split(linear.weight, mesh, 1)
        self.bias = None if linear.bias is None else _replicated(linear.bias, mesh)

    def forward(self, x: Tensor) -> Tensor:
        y = reduce_from(F.linear(x, _local(self.weight).to(x.dtype)), self.group)
        return y if self.bias is None else y + _local(self.bias).to(x.dtype)  # added once, after the sum

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return 2.0 * self.weight.numel()


class _VocabParallel(nn.Module):
    """Holds ``rows / tp`` vocabulary rows: those from `first` on."""

    def __init__(self, module: Any, mesh: Mesh) -> None:
        super().__init__()
        self.group = mesh.group("tp")
        self.weight = _split(module.weight, mesh, 0)
        self.rows = self.weight.shape[0] // mesh.degree("tp")
        self.first = self.rows * mesh.rank("tp")

    def tie(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def _here(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens this rank's rows cover, and their local row (0 where they are elsewhere)."""
        local = tokens - self.first
        here = (local >= 0) & (local < self.rows)
        return here, torch.where(here, local, 0)


class VocabParallelEmbedding(_VocabParallel):
    """Tokens ``[tokens]`` → ``[tokens, hidden]``: each rank looks up its own rows, the sum is the whole."""

    def forward(self, tokens: Tensor) -> Tensor:
        here, local = self._here(tokens)
        rows = F.embedding(local, _local(self.weight))
        return reduce_from(rows * here.unsqueeze(-1), self.group)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return 0.0


class VocabParallelHead(_VocabParallel):
    """The loss over logits that no rank holds whole: one max, one sum of exponentials, one target logit travel."""

    def __init__(self, head: Any, mesh: Mesh) -> None:
        super().__init__(head, mesh)
        self.vocab_size, self.z_loss = head.vocab_size, head.z_loss

    def forward(self, hidden: Tensor, ctx: Context, labels: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        logits = F.linear(copy_to(hidden, self.group), _local(self.weight).to(hidden.dtype)).float()
        real = min(max(self.vocab_size - self.first, 0), self.rows)
        logits = logits.index_fill(1, torch.arange(real, self.rows, device=logits.device), float("-inf"))
        if labels is None:
            raise NotSupportedYet("logits under tensor parallelism (the loss is)")
        top = all_reduce(logits.detach().amax(1), self.group, dist.ReduceOp.MAX)
        lse = top + reduce_from((logits - top.unsqueeze(1)).exp().sum(1), self.group).log()
        here, local = self._here(labels)
        target = reduce_from(torch.where(here, logits.gather(1, local.unsqueeze(1)).squeeze(1), 0.0), self.group)
        real_tokens = labels != -100
        z = self.z_loss * ctx.loss_scale * (lse.square() * real_tokens).sum()
        loss = ctx.loss_scale * ((lse - target) * real_tokens).sum()
        return loss + z, z.detach()

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return 2.0 * self.weight.numel()
