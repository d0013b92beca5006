"""A disk of `KENOTRON_BENCHMARK_DISK` bytes a second, for benchmarks of what waits for one. No torch: the process that
writes checkpoints imports this.

    checkpoints.writer: slow_disk.slow_file
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kenotron.checkpoint.durable import HashedFile

RATE = "KENOTRON_BENCHMARK_DISK"


class _SlowFile(HashedFile):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """What the machine's own disk does, and then the rest of the time."""
        started = time.monotonic()
        super().write(data)
        time.sleep(max(0.0, started + len(data) / float(os.environ[RATE]) - time.monotonic()))


def slow_file(path: Path, size: int) -> HashedFile:
    """A writer as `checkpoints.writer` names one."""
    return _SlowFile(path)
