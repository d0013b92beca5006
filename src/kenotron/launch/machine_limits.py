"""What a machine that is too small means for a run: one line that names the keys to change, with values.

with machine_limits(config, device):
    train(…)              # torch.OutOfMemoryError → RunFailed("out of memory …; try tokens.micro_batch_size=2 …")
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kenotron.config.errors import RunFailed
from kenotron.launch.environment import ranks_from_environment
from kenotron.launch.memory_needed import SPLIT, free_memory, what_fits
from kenotron.storage.hub import first_line

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@contextmanager
def machine_limits(config: Config, device: torch.device) -> Iterator[None]:
    """Raise RunFailed, with what to do, in place of torch's and Python's errors about memory and disks."""
    free = free_memory(device, ranks_from_environment().local_world_size)
    try:
        yield
    except Exception as error:
        if _out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # the advice needs some of the memory that they hold
            raise RunFailed(f"out of memory ({first_line(error)}); {_advice(config, free)}") from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"{error.filename or 'a file of the run'}: {error.strerror}; free space there, or set another "
                f"logging.log_dir, checkpoints.checkpoints_path or KENOTRON_CACHE"
            ) from error
        raise


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch.OutOfMemoryError and the CPU's allocator both raise RuntimeErrors
    named = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return named or isinstance(error, MemoryError)


def _advice(config: Config, free: int | None) -> str:
    try:
        return what_fits(config, free)
    except Exception:  # an estimate must not hide what it is about
        return f"lower tokens.micro_batch_size, now {config.tokens.micro_batch_size}, or {SPLIT}"
