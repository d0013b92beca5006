"""Guards: a run whose numbers are not finite fails; one that receives a signal saves and stops."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import RunFailed
from kenotron.training.console import logger
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class NonFiniteGuard(Hook):
    """Counts steps skipped for a non-finite loss or gradient, and gives up after too many in a row."""

    priority = -20

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0

    def after_step(self, run: Run, result: StepResult) -> None:
        """Count and log a skipped step; raise RunFailed after more than `skip_nonfinite_steps` in a row."""
        if not result.skipped:
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
        """The counts."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting from `state`."""
        self.in_a_row, self.total = state["in_a_row"], state["total"]


class Signals(Hook):
    """SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, exit with code 0. A second one exits at once.

    Ctrl-C under torchrun arrives twice, from the terminal and from torchrun: a signal within two seconds of the first
    counts as the same request. So does SIGTERM after SIGUSR1: Slurm's at the time limit, while the run is being saved.
    """

    priority = -40
    NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")
    SAME_REQUEST_SECONDS = 2.0

    def __init__(self) -> None:
        self.received: str | None = None
        self.received_at = 0.0
        self.run: Run | None = None
        self.previous: dict[int, Any] = {}

    def on_train_start(self, run: Run) -> None:
        """Install the handlers, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return  # Python delivers signals to the main thread only
        self.run = run
        for name in self.NAMES:
            number = getattr(signal, name, None)
            if number is not None:
                self.previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received, self.received_at = name, time.monotonic()
            assert self.run is not None
            self.run.stop(name)
        elif (self.received, name) != (
            "SIGUSR1",
            "SIGTERM",
        ) and time.monotonic() - self.received_at > self.SAME_REQUEST_SECONDS:
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
