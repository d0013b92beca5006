"""The processor cores of this process."""

import os


def cores_by_affinity() -> int:
    """Cores on which this process may run, whatever its share of them; all of the machine's where no system call says.

    Linux has the call, macOS has none.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
