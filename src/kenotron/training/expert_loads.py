"""Loads of the experts in a step, and the biases of routers that follow them (arXiv 2408.15664).

    slots of the global batch     90     10     50         mean 50
    bias of the expert          - rate  + rate   as it is

An expert with more than the mean is chosen less often in the next step, whatever the distance: no loss is needed, and
no gradient. Slots are counted over all micro-batches and ranks, so biases are the same on every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kenotron.parallel.collectives import all_reduce
from kenotron.parallel.shards import shard_of

if TYPE_CHECKING:
    from kenotron.training.run import Run


class ExpertLoads(NamedTuple):
    """Of one step, over all ranks: slots of each expert ``[layers, experts]``, balance and z loss ``[2]``."""

    slots: Tensor
    losses: Tensor


def loads_of_step(run: Run) -> ExpertLoads | None:
    """What was counted since the last call, summed in one collective; None: the model has no experts."""
    architecture = run.config.model.decoder
    if not architecture.experts:
        return None
    slots = architecture.num_hidden_layers * architecture.experts
    sums = torch.zeros(slots + 2, device=run.device)
    loads = ExpertLoads(sums[:slots].view(-1, architecture.experts), sums[slots:])
    for layer, mixture in _mixtures(run):
        loads.slots[layer] += mixture.expert_load
        loads.losses.add_(mixture.router_losses)
        mixture.expert_load.zero_()
        mixture.router_losses.zero_()
    all_reduce(sums, run.mesh.group("loss"))
    return loads


@torch.no_grad()
def move_biases(run: Run, loads: ExpertLoads) -> None:
    """Add the rate to the bias of every expert below its layer's mean, and subtract it from those above."""
    for layer, mixture in _mixtures(run):
        if rate := mixture.routing.bias_rate:
            slots = loads.slots[layer]
            bias = shard_of(mixture.gate.e_score_correction_bias)
            here = (slots.mean() - slots).sign().narrow(0, bias.offset[0], bias.tensor.shape[0])
            bias.tensor.add_(here.to(bias.tensor.device), alpha=rate)


def _mixtures(run: Run) -> Iterator[tuple[int, Any]]:
    """(layer, `MixtureOfExperts`) of those that this rank has."""
    for part in run.parts:
        for name, module in part.named_modules():
            if hasattr(module, "expert_load"):
                yield int(name.split(".")[2]), module
