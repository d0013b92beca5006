"""How evenly the experts of a mixture are used: numbers of every step, and a warning where one starves.

    router_balance_loss, router_z_loss   what both losses add to the training loss, summed over layers
    expert_load_max, expert_load_min     slots of the busiest and the idlest expert of a layer, over their mean
    expert_load_entropy                  of a layer's loads, as a share of its maximum; the mean over layers

They count the tokens of the global batch, so they are the same on every layout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor

    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

STARVING_STEPS = 100  # in a row without a token, before the warning


class ExpertLoad(Hook):
    """Records the numbers above; on all ranks."""

    priority = -5

    def __init__(self) -> None:
        self.steps_without_a_token: Tensor | None = None  # [layers, experts]

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record what the step has counted."""
        assert result.expert_loads is not None
        loads, losses = result.expert_loads
        routed = loads.sum(1) > 0  # layers that have experts
        shares = loads[routed] / loads[routed].mean(1, keepdim=True)
        entropy = torch.special.entr(shares / shares.shape[1]).sum(1) / math.log(max(shares.shape[1], 2))
        numbers = torch.stack((*losses, shares.max(), shares.min(), entropy.mean())).tolist()
        names = ("router_balance_loss", "router_z_loss", "expert_load_max", "expert_load_min", "expert_load_entropy")
        for name, number in zip(names, numbers, strict=True):
            run.record_metric(name, number, on_console=name == "expert_load_max")
        if run.mesh.is_first:
            self._warn_of_starving(loads, routed)

    def _warn_of_starving(self, loads: Tensor, routed: Tensor) -> None:
        idle = (loads == 0) & routed[:, None]
        before = torch.zeros_like(loads) if self.steps_without_a_token is None else self.steps_without_a_token
        self.steps_without_a_token = torch.where(idle, before + 1, 0)
        for layer, expert in (self.steps_without_a_token == STARVING_STEPS).nonzero().tolist():
            logger.warning(
                "model.layers.%d: expert %d got no token in %d steps; a larger router_aux_loss_coef spreads the load",
                layer,
                expert,
                STARVING_STEPS,
            )
