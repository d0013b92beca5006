"""Guards: stop a run that has gone wrong, and end one in good order when asked to."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from kenotron.train.console import logger
from kenotron.train.hooks import Hook

if TYPE_CHECKING:
    from kenotron.train.run import Run
    from kenotron.train.step import StepResult


class RunFailed(Exception):
    """The run cannot go on; the message says why and what to look at. Exit code 1."""


class NonFiniteGuard(Hook):
    """Counts steps skipped for a non-finite loss or gradient, and gives up after too many in a row."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.total = 0

    def after_step(self, run: Run, result: StepResult) -> None:
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
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.total = state["in_a_row"], state["total"]


class Signals(Hook):
    """SIGTERM, SIGUSR1 and Ctrl-C: finish the step, save, leave with exit code 0. A second one leaves at once.

    Ctrl-C under torchrun comes twice, from the terminal and from torchrun: what follows on the heels of the
    first is the same request.
    """

    NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")
    SAME_REQUEST_SECONDS = 2.0

    def __init__(self) -> None:
        self.received: str | None = None
        self.received_at = 0.0
        self.run: Run | None = None
        self.previous: dict[int, Any] = {}

    def on_train_start(self, run: Run) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python hands signals to the main thread only
        self.run = run
        for name in self.NAMES:
            number = getattr(signal, name, None)
            if number is not None:
                self.previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self.received_at = signal.Signals(number).name, time.monotonic()
            assert self.run is not None
            self.run.stop(self.received)
        elif time.monotonic() - self.received_at > self.SAME_REQUEST_SECONDS:
            self._restore()
            raise KeyboardInterrupt(f"second signal: {signal.Signals(number).name}")

    def on_train_end(self, run: Run) -> None:
        if self.received is not None:
            logger.warning("%s: saving after step %d and stopping", self.received, run.step)

    def on_close(self, run: Run) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}
