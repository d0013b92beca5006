"""What a machine that is too small means for a run: one line that names the keys to change, with values.

with machine_limits(config, device):
    train(…)              # torch.OutOfMemoryError → RunFailed("out of memory …; try tokens.micro_batch_size=2 …")

Linux grants most allocations, and kills a process that then uses more than there is. So there is a warning before
training if weights, gradients and optimizer state alone do not fit, and `why_killed` for a rank that was killed.
"""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError, RunFailed
from kenotron.launch.environment import accelerators, ranks_from_environment
from kenotron.launch.local import CUT_SHORT
from kenotron.launch.machine_memory import available_memory, out_of_memory_kills
from kenotron.launch.memory_needed import SPLIT, free_memory, states_too_large, what_fits
from kenotron.storage.hub import first_line

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


@contextmanager
def machine_limits(config: Config, device: torch.device, *, warn: bool = False) -> Iterator[None]:
    """Raise RunFailed, with what to do, in place of torch's and Python's errors about memory and disks.

    `warn`: print a warning first if weights, gradients and optimizer state alone do not fit.
    """
    ranks = ranks_from_environment()
    free = free_memory(device, ranks.local_world_size)
    if warn and ranks.rank == 0 and free is not None and (problem := states_too_large(config, free)):
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    try:
        yield
    except Exception as error:
        if _out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # the advice needs some of the memory that they hold
            raise RunFailed(f"out of memory ({first_line(error)}); {_advice(config, free)}") from error
        if type(error).__name__ == "FailOnRecompileLimitHit":  # of torch._dynamo, which takes seconds to import
            raise RunFailed(
                "model.compile: a function of the model was compiled as often as model_parts.COMPILATIONS allows, and "
                "would go on uncompiled; torch's warning above says what changes; expected numbers and shapes that few "
                "layers and batches differ in, or model.compile=false"
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"{error.filename or 'a file of the run'}: {error.strerror}; free space there, or set another "
                f"logging.log_dir, checkpoints.checkpoints_path or KENOTRON_CACHE"
            ) from error
        raise


def why_killed(config: Config, kills_before: int | None, number: int) -> str | None:
    """Why a rank of `config` on this machine was killed by the signal `number`; None where that is not known.

    `kills_before` is `out_of_memory_kills` before the ranks were started. "" if memory was not the reason of a SIGKILL.
    """
    if number == signal.SIGBUS:
        return _truncated_file(config)
    kills = out_of_memory_kills()
    if number != signal.SIGKILL or kills is None:
        return None
    if kills == kills_before:
        return ""
    said = "memory? The kernel has killed processes for lack of it since the run began"
    if accelerators():  # which have the weights: the advice is not for the host's memory
        return f"out of host {said}"
    available, count = available_memory(), config.parallelism.world_size
    return f"out of {said}; {_advice(config, None if available is None else available // count)}"


def _truncated_file(config: Config) -> str | None:
    """The first token file of `config` that is shorter than when the run mapped it into its memory."""
    from kenotron.data.stage_plan import check_files

    try:
        check_files(config)
    except InputError as error:
        return f"{CUT_SHORT}: {error}"
    return None


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
