"""A rank's numbers from the environment, and its share of the machine.

Sixteen cores and four ranks: four threads each, unless OMP_NUM_THREADS says otherwise; four accelerators, one each.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from kenotron.config.errors import InputError, counted
from kenotron.config.parallelism import stays_on_cpu
from kenotron.kernels.cores import cores_by_affinity
from kenotron.launch.machine_memory import processor_quota
from kenotron.launch.slurm.ranks import is_task_of_many, torchrun_variables

MOST_RANKS_PER_CORE = 4  # 8 ranks of a small model on a laptop's 2 cores are slow and useful, 64 are a mistake
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
MANY_RANKS = 128  # from which on gloo connects only those that communicate
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one variable, the second deprecated


@dataclass(frozen=True)
class Ranks:
    """This process among all, from torchrun's or srun's environment variables; the only one without them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def started_as_rank() -> bool:
    """Whether torchrun, srun or our own launcher has started this process as one of several."""
    if "RANK" not in os.environ and is_task_of_many(os.environ):
        os.environ.update(torchrun_variables(os.environ))
    if "RANK" not in os.environ and int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise InputError("mpirun started these processes, but its variables are not read: use torchrun or srun")
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def ranks_from_environment() -> Ranks:
    """The `Ranks` of this process. Raises InputError if a variable is not an integer."""
    started_as_rank()
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    values = [os.environ.get(name, default) for name, default in defaults.items()]
    try:
        return Ranks(*(int(value) for value in values))
    except ValueError:
        raise InputError(f"{', '.join(defaults)}: expected integers, found {', '.join(values)}") from None


def cores() -> int:
    """Processor cores that this process may use, by its affinity and its container's limit."""
    return within_quota(cores_by_affinity(), processor_quota())


def within_quota(cores: int, quota: float | None) -> int:
    """How many of `cores` run at the same time with a `quota` of processor time (None: no limit)."""
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def threads_each(ranks_on_machine: int) -> int:
    """Threads of each of `ranks_on_machine` ranks, so that together they are as many as the cores."""
    return max(1, cores() // ranks_on_machine)


def share_threads(ranks_on_machine: int) -> None:
    """Limit torch to this rank's share of the cores, unless OMP_NUM_THREADS is set.

    Where srun binds each task to cores of its own, these are its share: Slurm says how many.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        own = os.environ.get("SLURM_CPUS_PER_TASK", "") if is_task_of_many(os.environ) else ""
        bound = min(int(own), cores()) if own.isdecimal() else 0
        torch.set_num_threads(max(threads_each(ranks_on_machine), bound))


def default_variables(environment: Mapping[str, str], cuda: str | None) -> dict[str, str]:
    """Variables that a run adds to `environment`, never one that is set; `cuda`: the version that torch is built for.

    torch reads them when it first uses a GPU or makes a process group. Segments that grow keep packed documents, whose
    tensors are of ever new sizes, from fragmenting GPU memory; torch has them for CUDA only. Gloo would connect every
    rank of a group to every other when the group is made, by way of the one store of the run: a million reads of 8 kB
    for 1,024 ranks, and a thousand sockets in each of them.
    """
    found = {"TORCH_FR_BUFFER_SIZE": "2000"}  # torch's flight recorder, which `hangs` reads
    if int(environment.get("WORLD_SIZE", "1")) >= MANY_RANKS:
        found["TORCH_GLOO_LAZY_INIT"] = "1"
    if cuda is not None and not any(name in environment for name in ALLOCATOR):
        found[ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in found.items() if name not in environment}


def set_defaults() -> None:
    """Set variables, and let this process open as many files as the system allows. Call before torch uses a device."""
    import torch

    os.environ.update(default_variables(os.environ, torch.version.cuda))
    open_more_files()


def open_more_files() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard one: each token file is one, and each connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS refuses infinity: its limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_cores(ranks_on_machine: int) -> None:
    """Raise InputError if there are far more ranks than the machine can run: each is a process of about half a GB."""
    most = max(MOST_RANKS_PER_CORE * cores(), 8)
    if ranks_on_machine > most:
        raise InputError(
            f"parallelism: {ranks_on_machine} ranks on {counted(cores(), 'core')}, but at most {most} are started "
            f"here; lower a degree, or start them yourself, with torchrun --nproc_per_node={ranks_on_machine}"
        )


def started_by_kenotron() -> bool:
    """Whether `local.start_ranks` started this rank: then the launcher reports the failure that is recorded for it."""
    return "KENOTRON_LAUNCH" in os.environ


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the one that started it is gone (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def accelerators() -> int:
    """How many accelerators of this machine a run may use; 0: it uses the CPU. Raises as `stays_on_cpu` does."""
    import torch

    return 0 if stays_on_cpu() or not torch.cuda.is_available() else torch.cuda.device_count()


def device_number(ranks: Ranks) -> int:
    """Which of the accelerators that this process sees is its own: the only one where srun gives each task one
    (``--gpus-per-task=1``). Raises InputError if they are too few.
    """
    by_srun = is_task_of_many(os.environ) and "TORCHELASTIC_RUN_ID" not in os.environ
    if by_srun and accelerators() == 1:
        return 0
    check_devices(ranks.local_world_size)
    return ranks.local_rank


def check_devices(ranks_on_machine: int) -> None:
    """Raise InputError if the machine has accelerators, but fewer than ranks: each rank needs one."""
    devices = accelerators()
    if 0 < devices < ranks_on_machine:
        raise InputError(
            f"parallelism: {ranks_on_machine} ranks on this machine need an accelerator each, but it has {devices}; "
            f"KENOTRON_DEVICE=cpu trains on the CPU"
        )
