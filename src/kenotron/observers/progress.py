"""Show progress and ETA: a bar on a terminal, otherwise a line twice a minute."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import human_format
from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class Progress(Hook):
    """Shows a bar with loss and ETA on a terminal, below the log lines. It counts tokens, as batch sizes may change."""

    priority = -30
    bar: Any = None

    def on_train_start(self, run: Run) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[steps]}"),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self.task = self.bar.add_task("", steps="", loss="-")
        self._show(run, "-")
        self.bar.start()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Update the bar."""
        self._show(run, human_format(result.lm_loss))

    def _show(self, run: Run, loss: str) -> None:
        steps = f"{run.step}/{run.last_step}"
        self.bar.update(self.task, total=run.total_tokens, completed=run.consumed_tokens, steps=steps, loss=loss)

    def on_train_end(self, run: Run) -> None:
        """Stop the bar, before the last lines are logged."""
        self.on_close(run)

    def on_close(self, run: Run) -> None:
        """Stop the bar."""
        if self.bar is not None:
            self.bar.stop()


class Pace(Hook):
    """Logs progress and ETA twice a minute, if there is no terminal for a progress bar."""

    priority = -30
    SECONDS_BETWEEN = 30.0

    def on_train_start(self, run: Run) -> None:
        """Start the clock."""
        self.tokens_at_start = run.consumed_tokens
        self.started = self.logged = time.perf_counter()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log a line, if the last one is old enough."""
        now = time.perf_counter()
        if now - self.logged < self.SECONDS_BETWEEN or run.finished:
            return
        self.logged = now
        tokens, total = run.consumed_tokens, run.total_tokens
        left = (now - self.started) / (tokens - self.tokens_at_start) * (total - tokens)
        logger.info("training: %.0f%% | ETA %s", 100 * tokens / total, timedelta(seconds=round(left)))
