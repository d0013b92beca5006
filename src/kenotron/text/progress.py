"""Show the progress of a long preparation: a bar on a terminal, else a line every ten seconds, with the time left.

Background work prints plain lines as well, because the terminal belongs to the foreground.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Report = Callable[[str], None]

PLAIN_INTERVAL = 10.0


Update = Callable[[int], None]
"""A function that is called with the work done so far."""


@contextmanager
def progress(label: str, total: int, report: Report) -> Iterator[Update]:
    """Yield ``update(done)``, to be called with the work done so far, out of `total`."""
    if sys.stderr.isatty() and threading.current_thread() is threading.main_thread():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield _plain(label, total, report)


def _plain(label: str, total: int, report: Report) -> Update:
    start = last = time.monotonic()

    def update(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < PLAIN_INTERVAL or not done:
            return
        last = now
        left = (now - start) * (total - done) / done
        report(f"{label}: {100 * done / max(total, 1):.0f}%, about {left:.0f} s left")

    return update
