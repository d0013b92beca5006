"""Mixtures of experts over ranks.

Tensor parallelism splits every expert inside, as it splits a plain MLP; router and routing are the same on all ranks:

    x ─ all-gather or copy_to ─▶ router ─▶ [ gate up ] rows, [ down ] columns of all experts ─▶ sum or reduce-scatter

All collectives are at the two ends, also for the shared expert. Between them a rank's gradients of router and x are
summands: of the routing weights because its part of the experts is one, of the router's losses because each rank adds
its share of them (`MixtureOfExperts.equal_ranks`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.func import functional_call

from kenotron.parallel.collectives import copy_to, gather_tokens, reduce_from, scatter_tokens

if TYPE_CHECKING:
    from kenotron.models import Context
    from kenotron.parallel.tensor import TensorParallelSettings

PLACEMENTS: dict[str, Placement] = {  # of a parameter's name, the end
    "experts.gate_proj.weight": Shard(1),
    "experts.up_proj.weight": Shard(1),
    "experts.down_proj.weight": Shard(2),
    "shared_expert.gate_proj.weight": Shard(0),
    "shared_expert.up_proj.weight": Shard(0),
    "shared_expert.down_proj.weight": Shard(1),
}


class TensorParallelExperts(nn.Module):
    """A `MixtureOfExperts` whose experts are split over tp: x, as a column-parallel linear gets it, → the same."""

    def __init__(self, moe: Any, settings: TensorParallelSettings, name: str = "") -> None:
        super().__init__()
        self.settings = settings
        maths = copy.deepcopy(moe).to("meta")
        maths.equal_ranks = settings.degree
        self._maths = (maths,)  # in a tuple: a module whose names and (empty) weights are not the model's
        for path, parameter in list(moe.named_parameters()):
            owner, _, leaf = path.rpartition(".")
            local = settings.parameter(parameter, PLACEMENTS.get(path, Replicate()), name=f"{name}.{path}")
            setattr(moe.get_submodule(owner), leaf, local)
        for path, child in moe.named_children():
            self.add_module(path, child)
        for path, buffer in moe.named_buffers():
            self.register_buffer(path, buffer, persistent=False)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x ``[tokens, hidden]``, with REDUCE_SCATTER in training this rank's ``[tokens / tp, hidden]``."""
        group, shards = self.settings.group, self.settings.sequence and self.training
        x = gather_tokens(x, group) if shards else copy_to(x, group)
        tensors = {
            name: parameter.to_local(grad_placements=None if name in PLACEMENTS else [Partial()])  # type: ignore[attr-defined]
            for name, parameter in self.named_parameters()
        }
        y = functional_call(self._maths[0], tensors | dict(self.named_buffers()), (x, ctx))
        return scatter_tokens(y, group) if shards else reduce_from(y, group)

    def train(self, mode: bool = True) -> TensorParallelExperts:
        """Training mode also for the module that computes, which is no child of this one."""
        self._maths[0].train(mode)
        return super().train(mode)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Those of all ranks together: DTensors have the full shape, and the module that computes is the full one."""
        count: float = self._maths[0].flops_per_token(sequence_length, causal)
        return count
