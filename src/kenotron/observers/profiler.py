"""`profiler`: torch's trace of some steps, its snapshot of GPU memory, and its anomaly mode."""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kenotron.config.errors import InputError
from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.config.profiler import Profiler
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class ProfilerHook(Hook):
    """`profiler`: writes a torch trace of the steps of its schedule to `profiler_export_path`."""

    priority = 50
    profile: Any = None
    written = False

    def on_train_start(self, run: Run) -> None:
        """Start the profiler."""
        from torch.profiler import profile, schedule, tensorboard_trace_handler

        settings = run.config.profiler
        assert settings is not None
        assert settings.profiler_export_path is not None
        self.folder = Path(settings.profiler_export_path) / run.config.general.run
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's tracer would print its start and stop on stderr
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
        with warnings.catch_warnings():  # a new cycle drops the last one's events, which are on disk by then
            warnings.simplefilter("ignore", UserWarning)
            self.profile.step()

    def on_close(self, run: Run) -> None:
        """Stop the profiler."""
        if self.profile is not None:
            self.profile.stop()

    def on_train_end(self, run: Run) -> None:
        """Log a warning if the run was too short for the trace."""
        if not self.written and (settings := run.config.profiler):
            logger.warning("profiler: no trace was written: it needs %d steps of one process", settings.steps)


class MemorySnapshot(Hook):
    """`memory_snapshot_path`: writes a file for https://docs.pytorch.org/memory_viz on every rank."""

    EVENTS = 200_000  # the number of newest allocations and releases that are kept

    def __init__(self, settings: Profiler) -> None:
        self.settings = settings
        self.recording = False

    def on_train_start(self, run: Run) -> None:
        """Start to record. Raises InputError without a GPU."""
        if run.device.type != "cuda":
            raise InputError(f"profiler.memory_snapshot_path: expected a run on GPUs, found one on {run.device.type}")
        self.last_step = run.step + self.settings.steps
        torch.cuda.memory._record_memory_history(max_entries=self.EVENTS)
        self.recording = True

    def after_step(self, run: Run, result: StepResult) -> None:
        """Write the snapshot after the last step of the trace."""
        if run.step >= self.last_step:
            self._write(run)

    def on_close(self, run: Run) -> None:
        """Write the snapshot if the run failed, such as out of memory, or was shorter than the trace."""
        self._write(run)

    def _write(self, run: Run) -> None:
        if not self.recording:
            return
        folder = Path(str(self.settings.memory_snapshot_path))
        file = folder / f"{run.config.general.run.replace('/', '-')}-step{run.step}-rank{run.mesh.rank('world')}.pickle"
        folder.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))
        torch.cuda.memory._record_memory_history(enabled=None)
        self.recording = False
        logger.info("Wrote the memory snapshot to %s", file)


class AnomalyMode(Hook):
    """`detect_anomaly`: makes a NaN in backward raise with the traceback of the forward operation; on all ranks."""

    def on_train_start(self, run: Run) -> None:
        """Enable the mode."""
        self.mode = ExitStack()
        with warnings.catch_warnings():  # torch warns that it is slow, which the key's docs say
            warnings.simplefilter("ignore", UserWarning)
            self.mode.enter_context(torch.autograd.detect_anomaly(check_nan=True))

    def on_close(self, run: Run) -> None:
        """Disable the mode."""
        if hasattr(self, "mode"):
            self.mode.close()
