"""Loads of the experts in a step, and updates of the routers' biases from them (arXiv 2408.15664).

    slots of the global batch     90     10     50         mean 50
    bias of the expert          - rate  + rate   unchanged

An expert with more slots than the mean is chosen less often in the next step; the change does not depend on the
distance from the mean, and needs no loss and no gradient. Slots are counted over all micro-batches and ranks, so
biases are the same on every layout.
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
    """The experts' loads in one step, summed over all ranks: slots ``[layers, experts]``.

    `totals` ``[4]``: balance loss, z-loss, dropped slots, and the mean loss of predicting further tokens.
    """

    slots: Tensor
    totals: Tensor

    def on_host(self) -> ExpertLoads:
        """Start copies to the CPU, which are complete once the GPU's currently queued work is."""
        return ExpertLoads(*(tensor.to("cpu", non_blocking=True) for tensor in self))


def loads_of_step(run: Run) -> ExpertLoads | None:
    """Return the counts since the last call, summed in one collective; None if the model has no experts."""
    architecture = run.config.model.decoder
    if not architecture.experts:
        return None
    sums = torch.zeros(architecture.next_token_layers.stop * architecture.experts + 4, device=run.device)
    loads = ExpertLoads(sums[:-4].view(-1, architecture.experts), sums[-4:])
    for layer, mixture in mixtures(run):
        loads.slots[layer] += mixture.expert_load
        loads.totals[:3].add_(mixture.router_totals)
        mixture.expert_load.zero_()
        mixture.router_totals.zero_()
    for part in run.parts:
        if part.further_loss is not None:
            loads.totals[3] += part.further_loss
            part.further_loss = None
    all_reduce(sums, run.mesh.group("loss"))
    if run.loss_scale != 1:
        loads.totals[[0, 1, 3]] /= run.loss_scale
    return loads


@torch.no_grad()
def follow_loads(run: Run, loads: ExpertLoads) -> None:
    """Store the loads; add the rate to the bias of experts below their layer's mean, subtract it from those above."""
    for layer, mixture in mixtures(run):
        slots = loads.slots[layer]
        mixture.previous_load.copy_(slots)
        if rate := mixture.routing.bias_rate:
            bias = shard_of(mixture.gate.e_score_correction_bias)
            signs = (slots.mean() - slots).sign().narrow(0, bias.offset[0], bias.tensor.shape[0])
            bias.tensor.add_(signs.to(bias.tensor.device), alpha=rate)


def mixtures(run: Run) -> Iterator[tuple[int, Any]]:
    """Yield (layer, `MixtureOfExperts`) for this rank's mixtures."""
    for part in run.parts:
        for name, module in part.named_modules():
            if hasattr(module, "expert_load"):
                yield int(name.split(".")[2]), module
