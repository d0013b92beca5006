"""`optimizer.spikes`: skip updates of steps whose loss or gradient norm is far above that of the steps before.

    spikes: {z_score: 6, window: 128, snapshot_every: 50, max_rollbacks: 3}

    step        100 … 119   120          121          122 …
    lm_loss     2.1   2.1   9.7 spike    9.6 spike    2.1
    weights                 as after 119              as after 100, the last snapshot: something before 120 was wrong

A value is a spike if it is more than `z_score` standard deviations above the mean of the last `window` steps, the rule
of OLMo-core's SkipStepAdamW; non-finite values are spikes as well. A spike is detected before the update, so skipping
the step has the same result as a return to a snapshot and a repetition up to this step. A second spike in a row
suggests that the weights are the cause: then they are restored from the last snapshot, which discards all steps after
it (as PaLM did by hand, arXiv 2204.02311, section 5.1). A skipped or discarded step counts as a step and its samples as
read: the data order continues, and is the same after a resume.

`skipped_steps.jsonl` in the run's folder has a line for each such step with its samples and their documents. A snapshot
is also taken at every checkpoint, so that a run that is killed and resumed uses the same snapshot (unless the step of
the checkpoint was itself skipped). The guard is active after the first `window` steps of every stage, and of every
sequence length.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import RunFailed
from kenotron.data.provenance import described_samples
from kenotron.observers.snapshot import Snapshot
from kenotron.parallel.collectives import any_rank
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.metrics import drop_later_steps
from kenotron.training.run_folder import append_line, log_folder

if TYPE_CHECKING:
    from pathlib import Path

    from kenotron.config.optimizer import Spikes
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

FILE = "skipped_steps.jsonl"
NAMES = ("lm_loss", "grad_norm")
IN_A_ROW = 2
"""The number of spikes in a row after which the snapshot is restored."""


class SpikeGuard(Hook):
    """See the module; on all ranks."""

    priority = 60  # before hooks that read the weights

    def __init__(self, settings: Spikes) -> None:
        self.settings = settings
        self.snapshot = Snapshot()
        self.window: list[list[float]] = []  # [lm_loss, grad_norm] of the last accepted steps
        self.stage = 0  # the first step of their stage
        self.refused = False  # whether this hook has refused the current step
        self.in_a_row = 0
        self.rollbacks = 0  # to the current snapshot

    def on_train_start(self, run: Run) -> None:
        """Take the first snapshot; drop the lines of steps that are repeated after a resume."""
        self._take_snapshot(run)
        if run.mesh.is_first:
            drop_later_steps(_path(run), run.step)

    def accepts_update(self, run: Run, lm_loss: float, grad_norm: float) -> bool:
        """Return False on every rank if the step is a spike on any rank."""
        if (stage := run.data.stage_at(run.step + 1).start) != self.stage:
            self.window, self.stage = [], stage
        spike = max(self._z_scores([lm_loss, grad_norm])) > self.settings.z_score
        self.refused = any_rank(spike, run.mesh.world_size, run.device)
        return not self.refused

    def after_step(self, run: Run, result: StepResult) -> None:
        """Add an accepted step to the window; record a skipped step, and restore the snapshot if that is due.

        Raises RunFailed if the snapshot was restored too often.
        """
        if result.skipped:
            if self.refused or not result.finite:  # otherwise another hook has refused it
                self._skip(run, result)
            self.refused = False
            return
        self.in_a_row = 0
        self.window = [*self.window, [result.lm_loss, result.grad_norm]][-self.settings.window :]
        at_checkpoint = run.config.checkpoints.saves_at(run.step)
        if at_checkpoint or run.step - self.snapshot.step >= self.settings.snapshot_every:
            self._take_snapshot(run)
            self.rollbacks = 0

    def _take_snapshot(self, run: Run) -> None:
        self.snapshot.take(run)
        self.window_of_snapshot, self.stage_of_snapshot = self.window, self.stage

    def _skip(self, run: Run, result: StepResult) -> None:
        self.in_a_row += 1
        what = self._described(result)
        self._record(run, run.step, what)
        logger.warning("step %d is left out: %s; its samples are in %s", run.step, what, _path(run))
        if self.in_a_row < IN_A_ROW:
            return
        back = self.snapshot.step
        if self.rollbacks == self.settings.max_rollbacks:
            raise RunFailed(
                f"step {run.step}: {what}; {IN_A_ROW} spikes in a row after {self.rollbacks} returns to the weights of "
                f"step {back}, and optimizer.spikes.max_rollbacks allows no more. A lower learning rate, a "
                f"smaller optimizer.clip_grad or an earlier checkpoint are the usual remedies."
            )
        self.snapshot.restore(run)
        self.window, self.stage, self.in_a_row = self.window_of_snapshot, self.stage_of_snapshot, 0
        self.rollbacks += 1
        for step in range(back + 1, run.step - IN_A_ROW + 1):
            self._record(run, step, f"the weights returned to those of step {back} after step {run.step}")
        logger.warning("step %d: %d spikes in a row: the weights are those of step %d again", run.step, IN_A_ROW, back)

    # ---- the rule --------------------------------------------------------------------------------------------

    def _z_scores(self, values: list[float]) -> list[float]:
        """Return the standard deviations of every value above the mean of the window; 0 until the window is full."""
        if len(self.window) < self.settings.window:
            return [0.0] * len(values)
        return [z_score(value, before) for value, before in zip(values, zip(*self.window))]

    def _described(self, result: StepResult) -> str:
        values = [result.lm_loss, result.grad_norm]
        if not result.finite:
            return " and ".join(f"{name} is {value:.4g}" for name, value in zip(NAMES, values))
        scores = zip(NAMES, values, self._z_scores(values))
        parts = [f"{name} {value:.4g} is {score:.1f} standard deviations above" for name, value, score in scores]
        return f"{' and '.join(parts)} the mean of {self.settings.window} steps"

    # ---- the record ------------------------------------------------------------------------------------------

    def _record(self, run: Run, step: int, why: str) -> None:
        """Write the line of a skipped step, on rank 0."""
        if not run.mesh.is_first:
            return
        line: dict[str, Any] = {"iteration": run.step, "step": step, "why": why, "stage": run.data.stage_at(step).name}
        append_line(run.config, FILE, line | {"samples": described_samples(run.data, step)})

    # ---- restarts --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, except the snapshot, which is taken again at the start."""
        names = ("window", "stage", "in_a_row", "rollbacks")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name, value in state.items():
            setattr(self, name, value)


def z_score(value: float, before: tuple[float, ...]) -> float:
    """Return how many standard deviations `value` is above the mean of `before`.

    The standard deviation is taken as at least a millionth of the mean.
    """
    mean = statistics.fmean(before)
    return (value - mean) / max(statistics.pstdev(before, mean), 1e-6 * abs(mean), math.ulp(0.0))


def _path(run: Run) -> Path:
    return log_folder(run.config) / FILE
