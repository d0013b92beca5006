"""Dynamic loss scaling: float16 gradients below 6e-8 would be zero, so the loss is multiplied before backward.

    scale 65536   overflow: the step is skipped, scale 32768   …   2,000 steps without one: scale 65536

Gradients are divided by the scale in fp32, before their norm is computed. The norm, which is equal on all ranks, shows
an overflow. A non-finite step at scale 1 is no overflow, and counts for the non-finite guard.

Source: Micikevicius et al., "Mixed precision training" (arXiv 1710.03740); the constants are torch GradScaler's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

INITIAL, FACTOR, INTERVAL = 2.0**16, 2.0, 2000


class LossScale(Hook):
    """Sets `run.loss_scale` of every step, on all ranks."""

    priority = 55  # before the metrics, which write the scale to the step's line

    def __init__(self) -> None:
        self.scale, self.good_steps = INITIAL, 0

    def before_step(self, run: Run) -> None:
        """Set the scale."""
        run.loss_scale = self.scale

    def after_step(self, run: Run, result: StepResult) -> None:
        """Halve the scale after an overflow, double it after enough steps without one."""
        run.record_metric("loss_scale", result.loss_scale, on_console=False)
        if result.overflow:
            self.scale, self.good_steps = max(self.scale / FACTOR, 1.0), 0
            text = "step %d skipped: gradients overflow; loss scale %g → %g"
            logger.info(text, run.step, result.loss_scale, self.scale)
        elif result.finite:
            self.good_steps += 1
            if self.good_steps == INTERVAL:
                self.scale, self.good_steps = self.scale * FACTOR, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the number of steps in a row without an overflow."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.scale, self.good_steps = state["scale"], state["good_steps"]
