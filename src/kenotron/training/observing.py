"""Hooks that only observe: progress bar, generated samples, torch profiler."""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.training.console import human_format, logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

    Complete = Callable[[Run, Sequence[str]], Sequence[str]]


class Progress(Hook):
    """A bar with loss and ETA, on a terminal; log lines scroll above it. It counts tokens: steps may grow."""

    priority = -30

    def __init__(self) -> None:
        self.bar: Any = None

    @staticmethod
    def wanted() -> bool:
        """Whether standard output is a terminal."""
        return sys.stdout.isatty()

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
        """Move the bar."""
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
    """Logs progress and ETA twice a minute, where there is no terminal for a progress bar."""

    priority = -30
    SECONDS_BETWEEN = 30.0

    def on_train_start(self, run: Run) -> None:
        """Start the clock."""
        self.tokens_at_start = run.consumed_tokens
        self.started = self.logged = time.perf_counter()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log a line, if the last is old enough."""
        now = time.perf_counter()
        if now - self.logged < self.SECONDS_BETWEEN or run.finished:
            return
        self.logged = now
        tokens, total = run.consumed_tokens, run.total_tokens
        left = (now - self.started) / (tokens - self.tokens_at_start) * (total - tokens)
        logger.info("training: %.0f%% | ETA %s", 100 * tokens / total, timedelta(seconds=round(left)))


class SampleCompletions(Hook):
    """Logs completions of `logging.sample_prompts`, before the first step and after the last.

    `complete` makes them, on all ranks at once: training knows no decoding.
    """

    priority = -70

    def __init__(self, complete: Complete) -> None:
        self.complete = complete

    def on_train_start(self, run: Run) -> None:
        """Complete the prompts with the weights that training starts from."""
        self._show(run, "before training" if run.step == 0 else f"after step {run.step}")

    def on_train_end(self, run: Run) -> None:
        """Complete the prompts with the final weights."""
        self._show(run, f"after step {run.step}")

    def _show(self, run: Run, when: str) -> None:
        prompts = run.config.logging.sample_prompts or []
        for prompt, text in zip(prompts, self.complete(run, prompts)):
            logger.info("Sample %s, continuing %r:\n%s", when, prompt, prompt + text)


class ProfilerHook(Hook):
    """`profiler`: a torch trace of the steps that its schedule names, under `profiler_export_path`."""

    priority = 50

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.profile: Any = None
        self.written = False

    def on_train_start(self, run: Run) -> None:
        """Start the profiler."""
        from torch.profiler import profile, schedule, tensorboard_trace_handler

        settings = run.config.profiler
        assert settings is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's tracer reports its own start and stop on stderr
        write_tensorboard = tensorboard_trace_handler(str(self.folder))

        def on_trace_ready(trace: Any) -> None:
            before = set(self.folder.iterdir())
            write_tensorboard(trace)
            if settings.export_chrome_trace:  # the same file under another name: torch writes a trace only once
                (written,) = set(self.folder.iterdir()) - before
                shutil.copyfile(written, self.folder / f"chrome_trace_step_{run.step}.json")
            self.written = True
            logger.info("Wrote the profiler's trace to %s", self.folder)

        self.profile = profile(
            schedule=schedule(
                wait=settings.wait,
                warmup=settings.warmup,
                active=settings.active,
                repeat=settings.repeat,
                skip_first=settings.skip_first,
            ),
            record_shapes=settings.record_shapes,
            profile_memory=settings.profile_memory,
            with_stack=settings.with_stack,
            on_trace_ready=on_trace_ready,
        )
        self.profile.start()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Advance the profiler's schedule."""
        with warnings.catch_warnings():  # that a new cycle drops the last one's events: they are on disk by then
            warnings.simplefilter("ignore", UserWarning)
            self.profile.step()

    def on_close(self, run: Run) -> None:
        """Stop the profiler."""
        if self.profile is not None:
            self.profile.stop()

    def on_train_end(self, run: Run) -> None:
        """Say so if the run was too short for the trace."""
        if not self.written and (settings := run.config.profiler):
            logger.warning("profiler: no trace was written: it needs %d steps of one process", settings.steps)
