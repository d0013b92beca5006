"""Read a rank's numbers from the environment, and divide the machine among its ranks.

Each of four ranks gets four of sixteen cores, unless OMP_NUM_THREADS is set, and one of four accelerators.
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

MOST_RANKS_PER_CORE = 4  # 8 ranks of a small model on a laptop's 2 cores are slow but useful, 64 are a mistake
PR_SET_PDEATHSIG = 1  # in <linux/prctl.h>
MANY_RANKS = 128  # for at least so many, gloo connects only ranks that communicate
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one setting, the second is deprecated


@dataclass(frozen=True)
class Ranks:
    """The numbers of this process, from torchrun's or srun's environment variables; by default it is the only one."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def started_as_rank() -> bool:
    """Return whether torchrun, srun or Kénotron's launcher has started this process as one of several."""
    if "RANK" not in os.environ and is_task_of_many(os.environ):
        os.environ.update(torchrun_variables(os.environ))
    if "RANK" not in os.environ and int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise InputError("mpirun started these processes, but its variables are not read: use torchrun or srun")
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def ranks_from_environment() -> Ranks:
    """Return the `Ranks` of this process. Raises InputError if a variable is not an integer."""
    started_as_rank()
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    values = [os.environ.get(name, default) for name, default in defaults.items()]
    try:
        return Ranks(*(int(value) for value in values))
    except ValueError:
        raise InputError(f"{', '.join(defaults)}: expected integers, found {', '.join(values)}") from None


def cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's limit."""
    return within_quota(cores_by_affinity(), processor_quota())


def within_quota(cores: int, quota: float | None) -> int:
    """Return how many of `cores` can run at the same time with a `quota` of processor time (None: no limit)."""
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def threads_per_rank(ranks_on_machine: int) -> int:
    """Return the number of threads of each of `ranks_on_machine` ranks, which share the cores."""
    return max(1, cores() // ranks_on_machine)


def share_threads(ranks_on_machine: int) -> None:
    """Limit torch to this rank's share of the cores, unless OMP_NUM_THREADS is set.

    If srun binds each task to its own cores, all of them are its share, by SLURM_CPUS_PER_TASK.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        cpus = os.environ.get("SLURM_CPUS_PER_TASK", "") if is_task_of_many(os.environ) else ""
        bound = min(int(cpus), cores()) if cpus.isdecimal() else 0
        torch.set_num_threads(max(threads_per_rank(ranks_on_machine), bound))


def default_variables(environment: Mapping[str, str], cuda: str | None) -> dict[str, str]:
    """Return the variables that a run adds to `environment`; `cuda` is the CUDA version that torch is built for.

    Variables that are set are kept. torch reads them when it first uses a GPU or creates a process group. Expandable
    segments keep packed documents, whose tensors vary in size, from fragmenting GPU memory; torch has them for CUDA
    only. Gloo would connect every rank of a group to every other when the group is created, through the one store of
    the run: a million reads of 8 kB for 1,024 ranks, and a thousand sockets in each of them.
    """
    variables = {"TORCH_FR_BUFFER_SIZE": "2000"}  # torch's flight recorder, which `hangs` reads
    if int(environment.get("WORLD_SIZE", "1")) >= MANY_RANKS:
        variables["TORCH_GLOO_LAZY_INIT"] = "1"
    if cuda is not None and not any(name in environment for name in ALLOCATOR):
        variables[ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in variables.items() if name not in environment}


def set_defaults() -> None:
    """Set default variables, and raise the limit of open files. Call it before torch uses a device."""
    import torch

    os.environ.update(default_variables(os.environ, torch.version.cuda))
    open_more_files()


def open_more_files() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard one: each token file and each connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS refuses infinity: the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_cores(ranks_on_machine: int) -> None:
    """Raise InputError if the machine has too few cores for the ranks, each of which also takes about half a GB."""
    most = max(MOST_RANKS_PER_CORE * cores(), 8)
    if ranks_on_machine > most:
        raise InputError(
            f"parallelism: {ranks_on_machine} ranks on {counted(cores(), 'core')}, but at most {most} are started "
            f"here; lower a degree, or start them yourself, with torchrun --nproc_per_node={ranks_on_machine}"
        )


def started_by_kenotron() -> bool:
    """Return whether `local.start_ranks` started this rank: then the launcher reports the error that it records."""
    return "KENOTRON_LAUNCH" in os.environ


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent ends; does nothing except on Linux."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)


def accelerators() -> int:
    """Return the number of accelerators that a run may use; 0: it uses the CPU. Raises as `stays_on_cpu` does."""
    import torch

    return 0 if stays_on_cpu() or not torch.cuda.is_available() else torch.cuda.device_count()


def device_number(ranks: Ranks) -> int:
    """Return the index of this rank's accelerator, which is 0 if srun gives each task its own (``--gpus-per-task=1``).

    Raises InputError if there are too few.
    """
    by_srun = is_task_of_many(os.environ) and "TORCHELASTIC_RUN_ID" not in os.environ
    if by_srun and accelerators() == 1:
        return 0
    check_devices(ranks.local_world_size)
    return ranks.local_rank


def check_devices(ranks_on_machine: int) -> None:
    """Raise InputError if the machine has accelerators, but fewer than `ranks_on_machine`."""
    devices = accelerators()
    if 0 < devices < ranks_on_machine:
        raise InputError(
            f"parallelism: {ranks_on_machine} ranks on this machine need an accelerator each, but it has {devices}; "
            f"KENOTRON_DEVICE=cpu trains on the CPU"
        )
