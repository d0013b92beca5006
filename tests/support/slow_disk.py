"""A writer of checkpoint files (`checkpoints.writer`) that stops in the middle of one. No torch: the writer's process
imports this.

    checkpoints.writer: support.slow_disk.stops_at_step_4
"""

import os
import time
from pathlib import Path

from kenotron.checkpoint.durable import HashedFile

STOPPED = "stopped"
"""The file in the checkpoints' folder that says so, with the id of the writer's process."""


class _Stopping(HashedFile):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Of tensors, the first half; the rest when the training process is gone."""
        parent, half = os.getppid(), len(data) // 2
        super().write(data[:half])
        (self.path.parents[2] / STOPPED).write_text(str(os.getpid()))
        while os.getppid() == parent:
            time.sleep(0.01)
        super().write(data[half:])


def stops_at_step_4(path: Path, size: int) -> HashedFile:
    """Writes every checkpoint but that of step 4."""
    return (_Stopping if path.parents[1].name.startswith("4.") else HashedFile)(path)
