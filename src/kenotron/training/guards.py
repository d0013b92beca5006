"""Guards: end a run with too many non-finite losses or gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kenotron.config.errors import RunFailed
from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class NonFiniteGuard(Hook):
    """Counts steps skipped for a non-finite loss or gradient, and fails the run after too many in a row."""

    priority = -20

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count and log a non-finite step; raise RunFailed after more than `skip_nonfinite_steps` in a row."""
        if not result.broken:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.total += 1
        limit = run.config.optimizer.skip_nonfinite_steps
        what = f"lm_loss {result.lm_loss:.3g}, grad_norm {result.grad_norm:.3g}"
        if self.in_a_row > limit:
            raise RunFailed(
                f"step {run.step}: {what}; {self.in_a_row} non-finite steps in a row, and "
                f"optimizer.skip_nonfinite_steps allows {limit}. No weight was changed by them. "
                f"A lower learning rate, a longer warm-up or optimizer.clip_grad are the usual remedies."
            )
        logger.warning("step %d skipped: %s (%d skipped so far)", run.step, what, self.total)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from `state`."""
        self.in_a_row, self.total = state["in_a_row"], state["total"]
