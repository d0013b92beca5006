"""What a machine that is too small means for a run: one line that names the keys to change.

with machine_limits(config):
    train(…)              # torch.OutOfMemoryError → RunFailed("out of memory …; lower tokens.micro_batch_size …")
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kenotron.config.errors import RunFailed
from kenotron.storage.hub import first_line

if TYPE_CHECKING:
    from kenotron.config import Config

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@contextmanager
def machine_limits(config: Config) -> Iterator[None]:
    """Raise RunFailed, with what to do, in place of torch's and Python's errors about memory and disks."""
    try:
        yield
    except Exception as error:
        if _out_of_memory(error):
            raise RunFailed(f"out of memory ({first_line(error)}); {_smaller(config)}") from error
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


def _smaller(config: Config) -> str:
    """The keys that make a step of this config smaller."""
    tokens, layout = config.tokens, config.parallelism
    if tokens.micro_batch_size > 1:
        way = (
            f"lower tokens.micro_batch_size, now {tokens.micro_batch_size} (raise "
            f"tokens.batch_accumulation_per_replica as much to keep the batch)"
        )
    else:
        way = f"lower tokens.sequence_length, now {tokens.sequence_length}"
    recompute = "" if layout.recompute_layer else ", set parallelism.recompute_layer: true"
    return f"{way}{recompute}, or split the model: parallelism.tp, parallelism.pp, optimizer.zero_stage: 3"
