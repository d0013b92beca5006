"""Explain errors about memory and disks that are too small, and warn of them before a run starts.

with machine_limits(config, device):
    train(…)              # torch.OutOfMemoryError → RunFailed("out of memory …; try tokens.micro_batch_size=2 …")

Linux grants most allocations, and kills a process that then uses too much memory. So a run that may be too large asks
the planner first and warns, and `why_killed` returns the reason why a rank was killed. `machine_memory` reads the
memory of the machine.
"""

import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from kenotron.config import Config
from kenotron.config.errors import InputError, RunFailed
from kenotron.launch.environment import accelerators, ranks_from_environment
from kenotron.launch.local import CUT_SHORT
from kenotron.launch.machine_memory import available_memory, out_of_memory_kills
from kenotron.models import skeleton
from kenotron.storage.hub import first_line

OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
SPLIT = "split the model: parallelism.tp, parallelism.pp, optimizer.zero_stage: 3"


@contextmanager
def machine_limits(config: Config, device: torch.device, *, warn: bool = False) -> Iterator[None]:
    """Convert torch's and Python's errors about memory and disks to RunFailed, with advice.

    With `warn`, print a warning first if the run will need too much memory.
    """
    ranks = ranks_from_environment()
    free = free_memory(device, ranks.local_world_size)
    if warn and ranks.rank == 0 and free is not None and (problem := too_large(config, free)):
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    try:
        yield
    except Exception as error:
        if _out_of_memory(error):
            raise RunFailed(f"out of memory ({first_line(error)}); {advice(config)}") from error
        if type(error).__name__ == "FailOnRecompileLimitHit":  # torch._dynamo takes seconds to import
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
    """Return the reason why a rank of `config` on this machine was killed by the signal `number`, or None.

    `kills_before` is `out_of_memory_kills` before the start of the ranks. Return "" if a SIGKILL was not for memory.
    """
    if number == signal.SIGBUS:  # a memory-mapped token file may have been truncated
        from kenotron.data.stage_plan import check_files

        try:
            check_files(config)
        except InputError as error:
            return f"{CUT_SHORT}: {error}"
    kills = out_of_memory_kills()
    if number != signal.SIGKILL or kills is None:
        return None
    if kills == kills_before:
        return ""
    reason = "memory? The kernel has killed processes for lack of it since the run began"
    if accelerators():  # the advice is for the memory of weights and activations, which is the accelerator's
        return f"out of host {reason}"
    return f"out of {reason}; {advice(config)}"


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError and the CPU allocator's
        return any(words in str(error) for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def free_memory(device: torch.device, ranks_on_machine: int) -> int | None:
    """Return the bytes that a rank may still allocate on `device`, or None if they are unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = available_memory()
    if device.type != "cpu" or available is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    allowed = available if limit == resource.RLIM_INFINITY else max(limit - mapped, 1)
    return min(available // ranks_on_machine, allowed)


def too_large(config: Config, free: int) -> str | None:
    """Return a warning if rank 0 will need more than `free` bytes; None if not, or if that cannot be predicted.

    The planner takes seconds, so it is used only if weights, gradients and two moments in fp32 fill half of `free`.
    """
    layout = config.parallelism
    count = sum(parameter.numel() for parameter in skeleton(config.model).parameters())
    shards = (layout.dp_shard or layout.dp) * layout.context_parallel_size if config.zero_stage in (3, "hybrid") else 1
    if 16 * count / (layout.tp * layout.pp * shards) < free / 2:
        return None
    from kenotron.planner.hardware import GIB, gpu_here
    from kenotron.planner.memory import plan_memory

    peak = 0
    with suppress(Exception):  # a prediction must not end a run
        peak = plan_memory(config, gpu_here(), [0])[0].peak.bytes
    if peak < free:
        return None
    return f"rank 0 will need {peak / GIB:.3g} GiB of {free / GIB:.3g}; `kenotron plan` says what it is, and what fits"


def advice(config: Config) -> str:
    """Return advice for a `config` that did not fit, which keeps the global batch."""
    from kenotron.planner.verdict import in_batches_of

    tokens, layout = config.tokens, config.parallelism
    micro, count = tokens.micro_batch_size, tokens.batch_accumulation_per_replica
    if layout.pp_engine == "afab" and count > layout.pp > 1:
        first = f"try parallelism.pp_engine=1f1b, which keeps activations of {layout.pp} micro-batches, not of all"
    elif micro > 1:
        size = max(size for size in range(1, micro) if micro % size == 0)
        first = f"try {' '.join(in_batches_of(config, size))}"
    elif layout.recompute_layer is not True:
        first = "try parallelism.recompute_layer=true"
    else:
        first = f"lower tokens.sequence_length, now {tokens.sequence_length}, or {SPLIT}"
    return f"{first}; `kenotron plan` predicts what fits"
