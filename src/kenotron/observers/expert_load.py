"""How evenly the experts of a mixture are used: numbers of every step, and a warning where one starves.

    router_balance_loss, router_z_loss   what both losses add to the training loss, summed over layers
    expert_load_max, expert_load_min     slots of the busiest and the idlest expert of a layer, over their mean
    expert_load_entropy                  of a layer's loads, as a share of its maximum; the mean over layers
    expert_dropped                       share of the slots that a capacity dropped; only with one
    expert_load/<layer>/<expert>         its slots, over the mean of its layer; only with logging.expert_loads

They count the tokens of the global batch, so they are the same on every layout. Loads are what routers chose, before
anything is dropped. A balance loss over the global batch takes them in the next step: this hook saves them for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kenotron.training.console import logger
from kenotron.training.expert_loads import mixtures
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

STARVING_STEPS = 100  # in a row without a token, before the warning


class ExpertLoad(Hook):
    """Records the numbers above; on all ranks."""

    priority = 70  # before the spike guard, whose snapshots hold the loads
    steps_without_a_token: Tensor | None = None  # [layers, experts]
    previous_load: Tensor | None = None  # [layers, experts], where the balance loss takes it

    def on_train_start(self, run: Run) -> None:
        """Give routers the loads that a checkpoint has."""
        model = run.config.model.decoder
        if self.previous_load is not None:
            for layer, mixture in mixtures(run):
                mixture.previous_load.copy_(self.previous_load[layer])
        elif getattr(model, "router_aux_loss_scope", "sequence") == "global_batch":
            self.previous_load = torch.zeros(model.next_token_layers.stop, model.experts)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record what the step has counted."""
        assert result.expert_loads is not None
        loads, totals = result.expert_loads
        if self.previous_load is not None and not result.skipped:
            self.previous_load.copy_(loads)
        model = run.config.model.decoder
        routed = loads.sum(1) > 0  # layers that have experts
        shares = loads[routed] / loads[routed].mean(1, keepdim=True)
        entropy = torch.special.entr(shares / shares.shape[1]).sum(1) / math.log(max(shares.shape[1], 2))
        dropped = totals[2] / loads.sum()
        numbers = torch.stack((*totals[:2], shares.max(), shares.min(), entropy.mean(), dropped)).tolist()
        names = ["router_balance_loss", "router_z_loss", "expert_load_max", "expert_load_min", "expert_load_entropy"]
        if getattr(model, "moe_expert_capacity_factor", None) is not None:
            names.append("expert_dropped")
        for name, number in zip(names, numbers):
            run.record_metric(name, number, on_console=name == "expert_load_max")
        if model.next_token_layers:
            run.record_metric("next_token_loss", totals[3].item())
        if run.config.logging.expert_loads:
            for layer, row in zip(routed.nonzero().flatten().tolist(), shares.tolist()):
                for expert, share in enumerate(row):
                    run.record_metric(f"expert_load/{layer}/{expert}", share, on_console=False)
        if run.mesh.is_first:
            self._warn_of_starving(loads, routed)

    def state_dict(self) -> dict[str, Any]:
        """The loads of the last step, slots as integers."""
        return {} if self.previous_load is None else {"previous_load": self.previous_load.long().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Those of the step before the one that comes next."""
        self.previous_load = torch.tensor(state["previous_load"], dtype=torch.float32)

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
