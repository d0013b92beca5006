"""The hook that `kenotron replay` adds to the run that it repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class StopAfter(Hook):
    """Stops the run after a step, without a change of its length, on which the learning rate may depend."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run: Run, result: StepResult) -> None:
        """Stop after the step."""
        if run.step >= self.step:
            run.stop("replayed")
