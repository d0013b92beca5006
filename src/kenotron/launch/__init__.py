"""From one command to running ranks: who starts them, what each of them runs, what happens when one fails.

    kenotron train my.yaml                        torchrun … run_train.py --config-file my.yaml
      │ a layout of 1: trains here                   │ RANK and WORLD_SIZE are set: each process is a rank
      │ of more: local.start_ranks                   │
      └─▶ torch's elastic launcher ─▶ rank.main ─▶ work_on_ranks ◀─┘

launch(config)      train: in this process if it is a rank, alone or one of several; else in ranks started here
work_on_ranks(…)    the same for any other function of (config, mesh, device)
training.py         training as ranks run it, with readers of Hugging Face models and observers
comparing.py, replaying.py, data_which.py, transfer.py   `kenotron compare`, `replay`, `data which`, `mup check`
before_start.py     what a command warns of before a run starts
local.py            the ranks of this machine, through torch's elastic launcher
recovery.py         the same with spare processes: a rank that dies is replaced while the others stay
rank.py             what one of those processes runs; recovering_rank.py, where they are replaced
functions.py        how it is named for them
agreement.py        whether all ranks were started alike
shared_folder.py    whether all machines see one folder of checkpoints
environment.py      torchrun's variables; devices and threads shared among the ranks
failures.py         a rank that raises or dies ends all of them, and is reported as the cause
memory.py           a memory or disk that is too small
machine_memory.py   what the machine has
clouds              files for Kubeflow Trainer and SkyPilot
error_records.py    how a rank's error reaches the launcher
hangs.py            a collective that some rank does not join: which one, and who
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

# How much longer torch itself waits for a collective than `hangs` does, whose message says more.
TORCH_WAITS_LONGER_S = 10.0
SAY_EVERY_S = 60.0  # that a rank waits for the others to start


def launch(config: Config, *, fresh: bool = False, reopen: bool = False, spares: int = 0) -> Run | None:
    """Train `config`: in this process if the layout needs one or if it is one of the ranks, else in ranks started here.

    Returns the run of this process; None if it ran in other processes, or was finished already (`reopen`: that run is
    loaded and returned, if it is of this process). With `spares`, ranks are started here and replaced when they fail
    (`recovery`). Raises InputError or RunFailed.
    """
    refuse_unsupported(config)
    config = _with_experts_among_dp(config)
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

    if fresh:  # once, and not again when ranks are replaced
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


def _with_experts_among_dp(config: Config) -> Config:
    """`config` with ``dp * ep`` as dp, where processes were started for dp x ep x …, as the first Kénotron counts.

    Raises InputError if ep divides neither those ranks nor dp x cp.
    """
    layout, ranks = config.parallelism, ranks_from_environment()
    ep, dp, equal = layout.expert_parallel_size, layout.dp, layout.dp * layout.context_parallel_size
    if ep > 1 and started_as_rank() and ranks.world_size == layout.world_size * ep:
        changed = load(config, [f"parallelism.dp={dp * ep}"])
        if ranks.rank == 0:
            print(
                f"parallelism.dp: {ranks.world_size} processes are dp {dp} x ep {ep} x the rest: dp is read as "
                f"{dp * ep}, so a step has {changed.global_batch_size} samples and not {config.global_batch_size}",
                flush=True,
            )
        return changed
    if equal % ep:
        raise InputError(
            f"parallelism.expert_parallel_size: expected a divisor of dp x context_parallel_size {equal}, found {ep}: "
            f"data-parallel ranks share the experts (for {dp * ep} of them, set dp: {dp * ep})"
        )
    return config


def _print_first_line(config: Config) -> None:
    """Say what is trained before torch is imported, which takes seconds; nanotron's log has it with its prefix."""
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

    `work` is a function at the top of a module that the ranks can import; `options` are JSON values. Where ranks are
    started here, those other than 0 write their output to `logs` (None: kept only until they end without an error),
    and `why_killed` returns the cause to report when one was killed by the signal that it receives, None if it does not
    know. Returns what `work` returned in this process, None if it ran in others. Raises InputError if the number of
    processes does not fit the layout.
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
    """Raise InputError if torchrun or Slurm has not started as many processes as `config`'s layout needs.

    Or, if they are started here, if the layout needs more than this machine can run.
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
    """`work_on_ranks` in a process that is one of several ranks, which meet in `store` (None: where torchrun says).

    `watch` makes what watches the other ranks, from `parallelism.timeout_seconds` (None: `failures.Watch`).
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
        on_every_machine = ranks.local_world_size
        if not started_by_kenotron():
            from kenotron.launch.agreement import check_started_alike, ranks_on_every_machine

            check_started_alike(config, options)
            on_every_machine = ranks_on_every_machine(ranks)
        mesh = build_mesh(axes(config, on_every_machine), ranks.world_size, device.type)
        set_timeout_of_all_groups(timeout + TORCH_WAITS_LONGER_S)
        with collectives_in_memory(mesh) if device.type == "cpu" else nullcontext():
            return work(config, mesh, device, **options)


def start_process_group(device: torch.device, timeout_seconds: float, store: dist.Store | None = None) -> None:
    """Make the default group of all ranks, unless the caller has made it already.

    They meet in `store`, or where the environment says. Raises InputError if it does not say where. The group is
    destroyed when the process exits: gloo's threads, if they still run then, may abort it (SIGABRT), and the exit code
    is lost.
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
        with _says_while_it_waits(f"rank {ranks.rank} waits for all {ranks.world_size} ranks at {where}"):
            dist.init_process_group(backend(device), timeout=timeout, store=store, rank=rank, world_size=size)
    except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing
        raise InputError(f"RANK and WORLD_SIZE are set, but torch cannot find the other ranks: {error}") from None
    except RuntimeError as error:  # DistError, and what gloo raises when it connects the ranks
        if store is not None:
            raise
        raise RunFailed(
            f"rank {ranks.rank} on {socket.gethostname()} did not find all {ranks.world_size} ranks at {where} "
            "(MASTER_ADDR:MASTER_PORT): a wrong address or network interface, a port in use, or a machine that did not "
            f"start; {first_line(error)}"
        ) from None
    atexit.register(leave)


@contextmanager
def _says_while_it_waits(what: str) -> Iterator[None]:
    """A line a minute on standard error, until the block has ended."""
    over = Event()

    def say() -> None:
        while not over.wait(SAY_EVERY_S):
            print(what, file=sys.stderr, flush=True)

    Thread(target=say, name="kenotron-start", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def leave() -> None:
    """Destroy the process group, if there is one, and its threads with it."""
    import gc

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        gc.collect()  # objects that refer to each other still hold the group: its threads would outlive the interpreter
