"""From one command to running ranks: who starts them, what each is told, what happens when one fails.

    kenotron train my.yaml                        torchrun … run_train.py --config-file my.yaml
      │ a layout of 1: trains here                   │ RANK and WORLD_SIZE are set: each process is a rank
      │ of more: local.start_ranks                   │
      └─▶ torch's elastic launcher ─▶ rank.main ─▶ launch ◀─┘

launch(config)      this process is a rank, alone or one of several; or it starts them
work_on_ranks(…)    the same for any other function of (config, mesh, device)
local.py            the ranks of this machine, through torch's elastic launcher
rank.py             what one of those processes runs
environment.py      what torchrun's variables say; devices and threads shared out among the ranks
failures.py         a rank that raises or dies ends all of them, and is the one that is told
hangs.py            a collective that some rank does not join: which, and who
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.launch.environment import Ranks, check_devices, ranks_from_environment, share_threads, started_as_rank

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kenotron.config import Config
    from kenotron.train import Run

# How much longer torch itself waits for a collective than `hangs` does, who can say what went wrong.
TORCH_WAITS_LONGER_S = 10.0


def launch(config: Config, *, fresh: bool = False) -> Run | None:
    """Train `config`: here when the layout needs one process or this is one of its ranks, else in ranks started now.

    Gives the run of this process; None when it was finished already, or when it ran in other processes.
    """
    from kenotron.config import refuse_unsupported

    refuse_unsupported(config)
    logs = None
    if not started_as_rank() and config.parallelism.world_size > 1:
        from kenotron.launch.local import named

        config, logs = named(config, fresh)
    return work_on_ranks(config, "kenotron.train.train", logs=logs, fresh=fresh)


def work_on_ranks(config: Config, work: str, *, logs: Path | None = None, **options: Any) -> Any:
    """``work(config, mesh, device, **options)`` on every rank of `config`'s layout.

    `work` is the dotted path of a function, `options` are what JSON can hold. Gives what it gives here; None when it
    ran in other processes, which write what they say into `logs` (None: kept only until they end well).
    """
    needed = config.parallelism.world_size
    if not started_as_rank() and needed > 1:
        from kenotron.launch.local import start_ranks

        start_ranks(config, work, options, logs)
        return None
    ranks = ranks_from_environment()
    if ranks.world_size != needed:
        layout = config.parallelism
        raise InputError(
            f"parallelism: dp {layout.dp} x pp {layout.pp} x tp {layout.tp} x cp {layout.context_parallel_size} needs "
            f"{needed} processes, but {ranks.world_size} were started"
        )
    do = import_dotted(work, "work")
    return _work_alone(config, do, options) if needed == 1 else _work_as_rank(config, ranks, do, options)


def _work_alone(config: Config, do: Callable[..., Any], options: dict[str, Any]) -> Any:
    from kenotron.parallel.device import best_device
    from kenotron.parallel.mesh import axes, build_mesh

    device = best_device()
    return do(config, build_mesh(axes(config), 1, device.type), device, **options)


def _work_as_rank(config: Config, ranks: Ranks, do: Callable[..., Any], options: dict[str, Any]) -> Any:
    from kenotron.launch.failures import Watch
    from kenotron.parallel.device import best_device
    from kenotron.parallel.mesh import axes, build_mesh

    check_devices(ranks.local_world_size)
    share_threads(ranks.local_world_size)
    device = best_device(ranks.local_rank)
    timeout = config.parallelism.timeout_seconds
    start_process_group(device, timeout + TORCH_WAITS_LONGER_S)
    with Watch(timeout):
        mesh = build_mesh(axes(config, ranks.local_world_size), ranks.world_size, device.type)
        set_timeout(timeout + TORCH_WAITS_LONGER_S)
        return do(config, mesh, device, **options)


def start_process_group(device: torch.device, timeout_seconds: float) -> None:
    """The default group of all ranks, unless who calls us has made it already."""
    import os
    from datetime import timedelta

    import torch.distributed as dist

    from kenotron.parallel.device import backend

    if dist.is_initialized():
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # torch's flight recorder, which `hangs` reads
    try:
        dist.init_process_group(backend(device), timeout=timedelta(seconds=timeout_seconds))
    except ValueError as error:  # MASTER_ADDR or MASTER_PORT is missing
        raise InputError(f"RANK and WORLD_SIZE are set, but torch cannot find the other ranks: {error}") from None


def set_timeout(seconds: float) -> None:
    """Torch gives every new group its own default, 10 or 30 minutes, whatever the first group was told."""
    from datetime import timedelta

    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def leave() -> None:
    """Let go of the process group, if there is one: the last thing that a rank does."""
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
