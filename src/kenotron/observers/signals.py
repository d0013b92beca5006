"""A run that is asked to stop, by a signal or a file, finishes its step, saves and stops; `Run.stop` does the rest."""

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
    """SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, exit with code 0. A second one exits at once.

    Ctrl-C under torchrun arrives twice, from the terminal and from torchrun: a signal within two seconds of the first
    counts as the same request. So does SIGTERM after SIGUSR1: Slurm's at the time limit, while the run is being saved.
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
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals to that one only
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
        """Restore the handlers that were there before."""
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}


class KillSwitch(Hook):
    """`general.kill_switch_path`: a file that stops the run. Only rank 0 looks for it, once a second at most."""

    priority = -40
    EVERY_S = 1.0  # a network file system takes its time

    def __init__(self, path: Path) -> None:
        self.path, self.looked_at = path, 0.0

    def on_train_start(self, run: Run) -> None:
        """Raise InputError if the file is there."""
        if self.path.exists():
            raise InputError(f"general.kill_switch_path: {self.path} exists, which stops a run; remove it to train")

    def after_step(self, run: Run, result: StepResult) -> None:
        """Ask the run to stop, if the file has appeared."""
        if time.monotonic() - self.looked_at >= self.EVERY_S:
            self.looked_at = time.monotonic()
            if self.path.exists():
                run.stop(f"{self.path} exists")
                logger.warning(
                    "general.kill_switch_path: %s exists: saving after step %d and stopping", self.path, run.step
                )
