"""Count the processor cores of this process."""

import os


def cores_by_affinity() -> int:
    """Return the number of cores on which this process may run, or if the system has no call for it, all cores.

    Linux has such a call, macOS has none. CPU quotas are not considered.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
