"""Stop a run on a signal, or if a file appears: it finishes its step, saves and ends, by `Run.stop`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import InputError
from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class Signals(Hook):
    """Handles SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, exit with code 0. A second signal exits at once.

    Under torchrun, Ctrl-C arrives twice, from the terminal and from torchrun: a signal within two seconds of the first
    counts as the same request. So does SIGTERM after SIGUSR1, which Slurm sends at the time limit while the run saves.
    """

    priority = -40
    NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    SAME_REQUEST_SECONDS = 2.0

    def __init__(self) -> None:
        self.received: str | None = None
        self.received_at = 0.0
        self.run: Run | None = None
        self.previous: dict[int, Any] = {}

    def on_train_start(self, run: Run) -> None:
        """Install the handlers, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals only to the main thread
            path = run.config.checkpoint_folder.absolute()
            logger.warning("not in the main thread: SIGTERM does not save this run; its checkpoints go to %s", path)
            return
        self.run = run
        for number in self.NUMBERS:
            self.previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received, self.received_at = name, time.monotonic()
            assert self.run is not None
            self.run.stop(name)
            if self.run.mesh.is_first and os.isatty(2):  # a long step would seem to ignore Ctrl-C
                os.write(2, f"\n{name}: stopping after this step; a second signal ends the run at once\n".encode())
        elif not self._same_request(name):
            self._restore()
            raise KeyboardInterrupt(f"second signal: {name}")

    def _same_request(self, name: str) -> bool:
        soon = time.monotonic() - self.received_at <= self.SAME_REQUEST_SECONDS
        return soon or (self.received, name) == ("SIGUSR1", "SIGTERM")

    def on_train_end(self, run: Run) -> None:
        """Log which signal stopped the run."""
        if self.received is not None:
            logger.warning("%s: saving after step %d and stopping", self.received, run.step)

    def on_close(self, run: Run) -> None:
        """Restore the previous handlers."""
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}


class KillSwitch(Hook):
    """`general.kill_switch_path`: stops the run if a file appears. Only rank 0 checks, at most once a second."""

    priority = -40
    EVERY_S = 1.0  # because network file systems are slow

    def __init__(self, path: Path) -> None:
        self.path, self.checked_at = path, 0.0

    def on_train_start(self, run: Run) -> None:
        """Raise InputError if the file exists already."""
        if self.path.exists():
            raise InputError(f"general.kill_switch_path: {self.path} exists, which stops a run; remove it to train")

    def after_step(self, run: Run, result: StepResult) -> None:
        """Ask the run to stop, if the file has appeared."""
        if time.monotonic() - self.checked_at >= self.EVERY_S:
            self.checked_at = time.monotonic()
            if self.path.exists():
                run.stop(f"{self.path} exists")
                text = "general.kill_switch_path: %s exists: saving after step %d and stopping"
                logger.warning(text, self.path, run.step)
