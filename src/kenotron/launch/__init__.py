"""Start the ranks of a run, run a function on each of them, and end all of them when one fails.

    kenotron train my.yaml                        torchrun … run_train.py --config-file my.yaml
      │ a layout of 1: trains here                   │ RANK and WORLD_SIZE are set: each process is a rank
      │ a larger layout: local.start_ranks           │
      └─▶ torch's elastic launcher ─▶ rank.main ─▶ work_on_ranks ◀─┘

launch(config)      trains: in this process if it is a rank, alone or one of several; else in ranks started here
work_on_ranks(…)    does the same for any other function of (config, mesh, device)
training.py         the training function of the ranks, with readers of Hugging Face models and observers
comparing.py, replaying.py, data_which.py, transfer.py   `kenotron compare`, `replay`, `data which`, `mup check`
before_start.py     warnings before a run starts
local.py            starts the ranks of this machine, with torch's elastic launcher
recovery.py         starts them with spare processes: a rank that dies is replaced while the others stay
rank.py             the main function of a rank; recovering_rank.py: of a rank that may be replaced
functions.py        passes configs and functions to other processes
agreement.py        checks that all ranks were started alike
shared_folder.py    checks that all machines see one folder of checkpoints
environment.py      torchrun's variables; devices and threads of each rank
failures.py         ends all ranks when one raises or dies, and reports the cause
memory.py           errors about memory and disks that are too small
machine_memory.py   the memory and processor time of the machine
clouds              files for Kubeflow Trainer and SkyPilot
error_records.py    passes the error of a rank to the launcher
hangs.py            finds the collective that some rank does not join, and the rank
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, TypeVar

from kenotron.config import Config, load, refuse_unsupported
from kenotron.config.errors import InputError, RunFailed, counted
from kenotron.config.parallelism import HasLayout
from kenotron.launch.environment import (
    Ranks,
    check_cores,
    device_number,
    end_with_parent,
    ranks_from_environment,
    set_defaults,
    share_threads,
    started_as_rank,
    started_by_kenotron,
)
from kenotron.launch.functions import RankConfig, WhyKilled

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from kenotron.launch.failures import Watch
    from kenotron.training.run import Run

T = TypeVar("T")

# Torch waits this much longer for a collective than `hangs`, whose report has more details.
TORCH_WAITS_LONGER_S = 10.0
SAY_EVERY_S = 60.0  # interval of messages while a rank waits for the others to start


def launch(config: Config, *, fresh: bool = False, reopen: bool = False, spares: int = 0) -> Run | None:
    """Train `config`: in this process if it is a rank or the layout needs only one process, else in ranks started here.

    Return the run of this process, or None if it ran in other processes or was finished already. With `reopen`, a
    finished run is loaded and returned, if this process is its rank. With `spares`, ranks are started here and replaced
    when they fail (`recovery`). Raises InputError or RunFailed.
    """
    refuse_unsupported(config)
    config = _count_experts_in_dp(config)
    _print_first_line(config)
    from kenotron.launch.training import fetch_checkpoints, finished_before_start, name_before_start, train

    if spares and started_as_rank():
        raise InputError(
            "--spares: expected ranks that kenotron starts itself, on one machine; found ranks of torchrun or srun "
            "(a job of `kenotron submit` is requeued when a node fails)"
        )
    if started_as_rank() and "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # torchrun was killed: the ranks save and stop
    if not spares and (started_as_rank() or config.parallelism.world_size == 1):
        return work_on_ranks(config, train, fresh=fresh, reopen=reopen)
    from kenotron.checkpoint.local import run_folders
    from kenotron.launch.machine_memory import out_of_memory_kills
    from kenotron.launch.memory import why_killed

    fetch_checkpoints(config, fresh)
    config, logs = name_before_start(config, () if fresh else run_folders(config))
    if not fresh and finished_before_start(config):
        return None
    reason = partial(why_killed, config, out_of_memory_kills())
    if spares:
        _start_with_spares(config, fresh, logs, spares, reason)
        return None
    return work_on_ranks(config, train, logs=logs, why_killed=reason, fresh=fresh)


def _start_with_spares(config: Config, fresh: bool, logs: Path, spares: int, why_killed: WhyKilled) -> None:
    from kenotron.checkpoint.checkpoints import Checkpoints
    from kenotron.checkpoint.folders import list_checkpoints
    from kenotron.checkpoint.local import run_folders
    from kenotron.launch.recovery import start_ranks_with_spares
    from kenotron.launch.training import local_tier, train

    if fresh:  # only now, and not again when ranks are replaced
        checkpoints = Checkpoints(config, fresh=fresh, local=local_tier(config, Ranks()))
        with checkpoints.held():
            checkpoints.set_aside()
    start_ranks_with_spares(
        config,
        train,
        logs,
        spares,
        progress=lambda: [entry.step for root in run_folders(config) for entry in list_checkpoints(root)],
        why_killed=why_killed,
    )


def _count_experts_in_dp(config: Config) -> Config:
    """Return `config`, with ``dp * ep`` as dp if there are dp x ep x … processes, as the first Kénotron counts them.

    Raises InputError if there are not, and ep does not divide dp x cp.
    """
    layout, ranks = config.parallelism, ranks_from_environment()
    ep, dp, dp_cp = layout.expert_parallel_size, layout.dp, layout.dp * layout.context_parallel_size
    if ep > 1 and started_as_rank() and ranks.world_size == layout.world_size * ep:
        changed = load(config, [f"parallelism.dp={dp * ep}"])
        if ranks.rank == 0:
            print(
                f"parallelism.dp: {ranks.world_size} processes are dp {dp} x ep {ep} x the rest: dp is read as "
                f"{dp * ep}, so a step has {changed.global_batch_size} samples and not {config.global_batch_size}",
                flush=True,
            )
        return changed
    if dp_cp % ep:
        raise InputError(
            f"parallelism.expert_parallel_size: expected a divisor of dp x context_parallel_size {dp_cp}, found {ep}: "
            f"data-parallel ranks share the experts (for {dp * ep} of them, set dp: {dp * ep})"
        )
    return config


def _print_first_line(config: Config) -> None:
    """Print the project before torch is imported, which takes seconds; nanotron's format logs it later."""
    logs = config.logging
    if logs.format == "plain" and logs.log_level in ("debug", "info") and ranks_from_environment().rank == 0:
        print(f"project: {config.general.project}", flush=True)


def work_on_ranks(
    config: RankConfig,
    work: Callable[..., T],
    *,
    logs: Path | None = None,
    why_killed: WhyKilled | None = None,
    **options: object,
) -> T | None:
    """Call ``work(config, mesh, device, **options)`` on every rank of `config`'s layout.

    `work` is a function at the top of a module that the ranks can import; `options` are JSON values. If ranks are
    started here, ranks other than 0 write their output to `logs` (None: a folder that is removed when they end), and
    `why_killed` returns the cause to report if a rank was killed by the signal in its argument, or None if it is
    unknown. Return the result of `work` in this process, or None if it ran in others. Raises InputError if the number
    of processes does not fit the layout.
    """
    check_processes(config)
    needed = config.parallelism.world_size
    if not started_as_rank() and needed > 1:
        from kenotron.launch.local import start_ranks

        start_ranks(config, work, options, logs, why_killed)
        return None
    if needed > 1:
        return work_as_rank(config, work, options)
    from kenotron.parallel.device import best_device
    from kenotron.parallel.mesh import axes, build_mesh

    set_defaults()
    device = best_device()
    return work(config, build_mesh(axes(config), 1, device.type), device, **options)


def check_processes(config: HasLayout) -> None:
    """Raise InputError if torchrun or Slurm started another number of processes than `config`'s layout needs.

    If the ranks are to be started here, raise it if the layout needs more processes than this machine can run.
    """
    needed, ranks = config.parallelism.world_size, ranks_from_environment()
    if started_as_rank() and ranks.world_size != needed:
        layout = " x ".join(f"{name} {degree}" for name, degree in config.parallelism.degrees.items())
        raise InputError(
            f"parallelism: {layout} needs {counted(needed, 'process')}, but "
            f"{ranks.world_size} {'was' if ranks.world_size == 1 else 'were'} started"
        )
    if not started_as_rank():
        check_cores(needed)


def work_as_rank(
    config: RankConfig,
    work: Callable[..., T],
    options: dict[str, object],
    store: dist.Store | None = None,
    watch: Callable[[float], Watch] | None = None,
) -> T:
    """Do the work of `work_on_ranks` as one of several ranks, which meet in `store` (None: in torchrun's).

    `watch` returns the watch over the other ranks for `parallelism.timeout_seconds` (None: `failures.Watch`).
    """
    from kenotron.launch.failures import Watch
    from kenotron.parallel.device import best_device
    from kenotron.parallel.mesh import axes, build_mesh
    from kenotron.parallel.shared_memory import collectives_in_memory
    from kenotron.parallel.torch_internals import set_timeout_of_all_groups

    ranks = ranks_from_environment()
    number = device_number(ranks)
    share_threads(ranks.local_world_size)
    set_defaults()
    device = best_device(number)
    timeout = config.parallelism.timeout_seconds
    start_process_group(device, timeout + TORCH_WAITS_LONGER_S, store)
    with (watch or Watch)(timeout):
        per_machine = ranks.local_world_size
        if not started_by_kenotron():
            from kenotron.launch.agreement import check_started_alike, ranks_on_every_machine

            check_started_alike(config, options)
            per_machine = ranks_on_every_machine(ranks)
        mesh = build_mesh(axes(config, per_machine), ranks.world_size, device.type)
        set_timeout_of_all_groups(timeout + TORCH_WAITS_LONGER_S)
        with collectives_in_memory(mesh) if device.type == "cpu" else nullcontext():
            return work(config, mesh, device, **options)


def start_process_group(device: torch.device, timeout_seconds: float, store: dist.Store | None = None) -> None:
    """Create the default process group of all ranks, unless it exists.

    The ranks meet in `store`, or at the address in the environment. Raises InputError if there is no address. The group
    is destroyed when the process exits, because gloo's threads may otherwise abort the process (SIGABRT), and its exit
    code is lost.
    """
    import atexit
    from datetime import timedelta

    import torch.distributed as dist
    import torch.distributed.nn.functional  # noqa: F401 (its default arguments keep the group that exists when it is imported)

    from kenotron.parallel.device import backend
    from kenotron.storage.hub import first_line

    if dist.is_initialized():
        return
    ranks = ranks_from_environment()
    rank, size = (-1, -1) if store is None else (ranks.rank, ranks.world_size)  # -1: torch reads the environment
    timeout = timedelta(seconds=timeout_seconds)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        with _repeat_while_waiting(f"rank {ranks.rank} waits for all {ranks.world_size} ranks at {where}"):
            dist.init_process_group(backend(device), timeout=timeout, store=store, rank=rank, world_size=size)
    except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing
        raise InputError(f"RANK and WORLD_SIZE are set, but torch cannot find the other ranks: {error}") from None
    except RuntimeError as error:  # DistError, or an error of gloo when it connects the ranks
        if store is not None:
            raise
        raise RunFailed(
            f"rank {ranks.rank} on {socket.gethostname()} did not find all {ranks.world_size} ranks at {where} "
            "(MASTER_ADDR:MASTER_PORT): a wrong address or network interface, a port in use, or a machine that did not "
            f"start; {first_line(error)}"
        ) from None
    atexit.register(leave)


@contextmanager
def _repeat_while_waiting(message: str) -> Iterator[None]:
    """Print `message` to stderr every minute until the block ends."""
    done = Event()

    def repeat() -> None:
        while not done.wait(SAY_EVERY_S):
            print(message, file=sys.stderr, flush=True)

    Thread(target=repeat, name="kenotron-start", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def leave() -> None:
    """Destroy the process group and its threads, if there is one."""
    import gc

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()  # reference cycles still hold the group, whose threads would outlive the interpreter
