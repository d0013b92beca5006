"""Write the metrics of every step for TensorBoard, to the run's folder, whose name is that of the curves."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kenotron.config import dump
from kenotron.runs.logged import tag_of
from kenotron.training.hooks import Hook
from kenotron.training.metrics import not_written
from kenotron.training.run_folder import log_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from kenotron.training.metrics import EvaluationResult
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class TensorBoard(Hook):
    """Writes the metrics as scalars, and project and config as text; only on rank 0."""

    priority = -15  # after the line of metrics

    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.excepthook = threading.excepthook
        self.written_step = 0

    def after_step(self, run: Run, result: StepResult) -> None:
        """Write the step's scalars. Raises RunFailed if they cannot be written."""
        self.written_step = run.step
        try:
            if self.writer is None:
                self.writer = self._open(run)
            for name in sorted(run.last_metrics.keys() - {"iteration"}, key=lambda name: name != "lm_loss"):
                self.writer.add_scalar(tag_of(name), float(run.last_metrics[name]), run.step)
        except OSError as error:
            self.writer = None  # closing it would write again
            raise not_written(f"TensorBoard's file in {log_folder(run.config)}", run, error) from error

    def after_evaluation(self, run: Run, result: EvaluationResult) -> None:
        """Write the results at the step of the checkpoint."""
        for name, value in result.metrics.items():
            if self.writer is not None:
                self.writer.add_scalar(name, value, result.step)

    def on_error(self, run: Run, error: Exception) -> None:
        """Write the scalars of the last step, if another hook failed before they were written."""
        if self.writer is not None and run.last_result is not None and self.written_step < run.step:
            self.after_step(run, run.last_result)

    def on_close(self, run: Run) -> None:
        """Close the file."""
        if self.writer is not None:
            self.writer.close()
            threading.excepthook = self.excepthook

    def _open(self, run: Run) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter  # takes a second: after the first step, not before

        threading.excepthook = self._show_failed_thread
        writer = SummaryWriter(str(log_folder(run.config)), purge_step=run.step)
        writer.add_text("project", run.config.general.project, run.step)
        writer.add_text("config", f"```yaml\n{dump(run.config)}\n```", run.step)
        return writer

    def _show_failed_thread(self, failed: threading.ExceptHookArgs) -> None:
        if type(failed.thread).__name__ != "_AsyncWriterThread":  # TensorBoard raises its error at the next write
            self.excepthook(failed)
