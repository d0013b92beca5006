"""Start a process that works beside training."""

import os
import signal

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
NICE = 10


def stay_in_background() -> None:
    """Ignore the signals that a scheduler sends to every process of a job, and run at low priority."""
    for name in SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    os.nice(NICE)
