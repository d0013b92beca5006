"""Metrics of how evenly the experts of a mixture are used, and a warning if an expert starves.

    router_balance_loss, router_z_loss   the parts of the training loss from both losses, summed over layers
    expert_load_max, expert_load_min     slots of the busiest and the idlest expert of a layer, over their mean
    expert_load_entropy                  the entropy of a layer's loads over its maximum; the mean over layers
    expert_dropped                       the share of slots that were dropped; only with a capacity
    expert_load/<layer>/<expert>         the expert's slots over the mean of its layer; only with logging.expert_loads

They count the tokens of the global batch, so they are the same on every layout. Loads are the routers' choices, before
any are dropped. A balance loss over the global batch uses them in the next step, so this hook saves them.
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

STARVING_STEPS = 100  # steps in a row without a token before the warning


class ExpertLoad(Hook):
    """Records these metrics; on all ranks."""

    priority = 70  # before the spike guard, whose snapshots hold the loads
    steps_without_a_token: Tensor | None = None  # [layers, experts]
    previous_load: Tensor | None = None  # [layers, experts], if the balance loss uses it

    def on_train_start(self, run: Run) -> None:
        """Pass the loads of a checkpoint to the routers."""
        model = run.config.model.decoder
        if self.previous_load is not None:
            for layer, mixture in mixtures(run):
                mixture.previous_load.copy_(self.previous_load[layer])
        elif getattr(model, "router_aux_loss_scope", "sequence") == "global_batch":
            self.previous_load = torch.zeros(model.next_token_layers.stop, model.experts)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record the metrics of the step."""
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
        """Return the loads of the last step, in slots as integers."""
        return {} if self.previous_load is None else {"previous_load": self.previous_load.long().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loads of the last step."""
        self.previous_load = torch.tensor(state["previous_load"], dtype=torch.float32)

    def _warn_of_starving(self, loads: Tensor, routed: Tensor) -> None:
        idle = (loads == 0) & routed[:, None]
        before = torch.zeros_like(loads) if self.steps_without_a_token is None else self.steps_without_a_token
        self.steps_without_a_token = torch.where(idle, before + 1, 0)
        for layer, expert in (self.steps_without_a_token == STARVING_STEPS).nonzero().tolist():
            text = "model.layers.%d: expert %d got no token in %d steps; a larger router_aux_loss_coef spreads the load"
            logger.warning(text, layer, expert, STARVING_STEPS)
