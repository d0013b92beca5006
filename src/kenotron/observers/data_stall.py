"""Log steps that wait long for their batches, with the line of code that reads them.

    warning: step 13 has waited 60 s for its batches, a data stall: reading at remote.py:88 in fetch

If only some ranks wait, the others time out in a collective, whose report (launch/hangs.py) has the same message. The
run continues, because the source may recover.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kenotron.data.loader import THREADS
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.run import next_batches

if TYPE_CHECKING:
    from kenotron.training.run import Run

LONG_S = 60.0
SHARED_MEMORY = "kenotron.parallel.shared_memory"  # replaces torch.distributed on CPUs


class DataStall(Hook):
    """See the module; on all ranks. `seconds` is the longest wait that is not logged."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def on_train_start(self, run: Run) -> None:
        """Start the thread that watches."""
        self.thread = threading.Thread(target=self._look, args=(run,), name="kenotron-stalls", daemon=True)
        self.thread.start()

    def on_close(self, run: Run) -> None:
        """Stop the thread."""
        self.over.set()
        if self.thread is not None:
            self.thread.join()

    def _look(self, run: Run) -> None:
        """Log a warning whenever a step has waited for another `seconds`."""
        step, since = run.step, time.monotonic()
        while not self.over.wait(self.seconds / 10):
            waited = time.monotonic() - since
            if not run.waiting_for_data or run.step != step:
                step, since = run.step, time.monotonic()
            elif waited > self.seconds and (place := place_of_reading()) is not None:
                text = "step %d has waited %.0f s for its batches, a data stall: reading at %s"
                logger.warning(text, step + 1, waited, place)
                step = -1  # restarts the clock


def place_of_reading() -> str | None:
    """Return where the main thread or the loader's reads batches; None unless the main thread waits for them."""
    frame = _frame(threading.main_thread().ident)
    while frame is not None and frame.f_code is not next_batches.__code__:
        frame = frame.f_back
    if frame is None:
        return None
    loaders = (thread.ident for thread in threading.enumerate() if thread.name.startswith(THREADS))
    places = (place_of(ident)[0] for ident in (*loaders, threading.main_thread().ident))
    return next(place for place in places if not place.endswith(" in _work"))  # an idle loader


def place_of(thread: int | None = threading.main_thread().ident) -> tuple[str, bool]:
    """Return where a thread is, as ``file.py:31 in after_step``, and whether it may be in torch.distributed below that.

    In `kenotron.parallel` it may be: waits for collectives are in native code, which has no frame.
    """
    frame = _frame(thread)
    communicating = False
    while frame is not None and _is_library(module := frame.f_globals.get("__name__", "")):
        communicating = communicating or module.startswith(("torch.distributed", SHARED_MEMORY))
        frame = frame.f_back
    if frame is None:
        return "an unknown place", communicating
    communicating = communicating or module.startswith("kenotron.parallel.")
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}", communicating


def _frame(thread: int | None) -> FrameType | None:
    return sys._current_frames().get(thread or 0)


def _is_library(module: str) -> bool:
    """Return whether a module is of torch or Python, or replaces torch.distributed, so that its caller is reported."""
    root = module.split(".")[0]
    return root == "torch" or module == SHARED_MEMORY or (root in sys.stdlib_module_names and root != "__main__")
