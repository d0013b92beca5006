"""Code that the modules of tensor parallelism share: their settings, and local shards of weights.

A parameter is a DTensor on the mesh's tp axis, but only as a label; computation uses its `local_part`. `OwnMaths` lets
a module compute with such shards in its own forward, with whole weights (`Replicated`) or a rank's features
(`ChannelParallel`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.func import functional_call

from kenotron.config.errors import InputError
from kenotron.parallel.collectives import copy_to, gather_tokens, reduce_from, scatter_tokens


@dataclass(frozen=True)
class TensorParallelSettings:
    """How a model's layers are split: over which ranks, and with which collectives."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    sequence: bool
    asynchronous: bool
    recompute_allgather: bool

    @property
    def degree(self) -> int:
        """The number of ranks along the tp axis."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This process's rank along the tp axis."""
        return self.group.rank()

    def enter(self, x: Tensor, training: bool) -> Tensor:
        """Return all tokens of the rank's residual stream, for code that computes something different on each rank."""
        return gather_tokens(x, self.group) if self.sequence and training else copy_to(x, self.group)

    def leave(self, y: Tensor, training: bool) -> Tensor:
        """Return the sum of all ranks' y over all tokens, as the rank's residual stream (whole or sharded).

        y must not be used afterwards: its memory may be overwritten.
        """
        if self.sequence and training:
            return scatter_tokens(y, self.group)
        return reduce_from(y, self.group, overwrite=True)

    def parameter(self, whole: Tensor, placement: Placement, together: int = 1, name: str = "") -> nn.Parameter:
        """Return this rank's shard of `whole` as a DTensor. `together` adjacent rows or columns stay on one rank.

        `name`, the module's, is for the error.
        """
        local = whole.detach()
        if isinstance(placement, Shard):
            size = local.shape[placement.dim]
            if size % (together * self.degree):
                what = f"{size // together} heads" if together > 1 else f"{size} {('rows', 'columns')[placement.dim]}"
                raise InputError(
                    f"parallelism.tp: {name or 'a weight'}: expected a divisor of its {what}, found {self.degree}"
                )
            local = local.chunk(self.degree, placement.dim)[self.rank]
        label = DTensor.from_local(local.clone(), self.mesh, [placement], run_check=False)
        return nn.Parameter(label, whole.requires_grad)


def local_part(parameter: Tensor, partial: bool = False) -> Tensor:
    """Return this rank's shard of `parameter`; `partial`: its gradient is one summand of the ranks' sum."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()] if partial else None)


def split_by_heads(
    module: Any, settings: TensorParallelSettings, head_dim: int, kv: bool, dim: int = 0
) -> tuple[Placement, slice | None]:
    """Return the placement of a weight with heads along `dim` (1 for the columns of an embedding), and None.

    If there are fewer key-value heads (`kv`) than ranks, every rank has the whole weight, and the second result is the
    slice of the head that this rank uses.
    """
    if kv:
        heads = module.weight.shape[dim] // head_dim
        if heads < settings.degree and settings.degree % heads == 0:
            first = settings.rank * heads // settings.degree * head_dim
            return Replicate(), slice(first, first + head_dim)
    return Shard(dim), None


def rows_here(parameter: Tensor, rows: slice | None) -> Tensor:
    """Return this rank's shard, or `rows` of a weight that every rank has whole, whose gradient is then partial."""
    return local_part(parameter) if rows is None else local_part(parameter, partial=True)[rows]


class OwnMaths(nn.Module):
    """Runs a module's own forward, with its arguments and result, on this rank's shards of its weights."""

    def __init__(self, module: nn.Module, parameter_of: Callable[[Tensor], nn.Parameter]) -> None:
        super().__init__()
        for name, parameter in module.named_parameters():
            self.register_parameter(name, parameter_of(parameter))
        for name, buffer in module.named_buffers():
            self.register_buffer(name, buffer)
        self._maths = (module.to("meta"),)  # a tuple hides its names and (empty) weights from the model

    def _here(self, parameter: Tensor) -> Tensor:
        """Return the local tensor of a parameter that the module computes with."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        tensors = {name: self._here(parameter) for name, parameter in self._parameters.items() if parameter is not None}
        return functional_call(self._maths[0], tensors | dict(self.named_buffers()), args, kwargs)

    def train(self, mode: bool = True) -> OwnMaths:
        """Set the mode also for the module that computes, which is not a child of this one."""
        self._maths[0].train(mode)
        return super().train(mode)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the module's own count, or 0 if it has none."""
        module: Any = self._maths[0]
        return module.flops_per_token(sequence_length, causal) if hasattr(module, "flops_per_token") else 0.0


class Replicated(OwnMaths):
    """A module whose weights are whole on every rank, such as a norm.

    `on_shards`: with REDUCE_SCATTER in training it sees only the rank's own tokens, so its gradients are partial.
    `per_head`: it sees only the rank's own heads, in every mode.
    """

    def __init__(
        self, module: nn.Module, settings: TensorParallelSettings, on_shards: bool, per_head: bool = False
    ) -> None:
        super().__init__(module, lambda parameter: settings.parameter(parameter, Replicate()))
        self.on_shards, self.per_head = on_shards and settings.sequence, per_head

    def _here(self, parameter: Tensor) -> Tensor:
        return local_part(parameter, self.per_head or (self.on_shards and self.training))


class ChannelParallel(OwnMaths):
    """A module that computes feature by feature: a rank has its features' rows of every parameter.

    `together` adjacent rows stay on one rank; `kv` as in `ColumnParallelLinear`.
    """

    def __init__(self, module: nn.Module, settings: TensorParallelSettings, name: str, together: int, kv: bool) -> None:
        placement, rows = split_by_heads(module, settings, together, kv)
        super().__init__(module, lambda parameter: settings.parameter(parameter, placement, together, name))
        self.rows = rows

    def _here(self, parameter: Tensor) -> Tensor:
        return rows_here(parameter, self.rows)
