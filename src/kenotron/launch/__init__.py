"""From one command to running ranks: the environment, the device, the process group.

launch(config)      this process is a rank: alone, or started by torchrun or Slurm's equivalent variables
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.train import Run


@dataclass(frozen=True)
class Ranks:
    """This process among all, as torchrun tells by environment variables; alone without them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def ranks_from_environment() -> Ranks:
    values = [
        os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    ]
    try:
        return Ranks(*(int(value) for value in values))
    except ValueError:
        raise InputError(f"RANK, WORLD_SIZE, LOCAL_RANK: expected integers, found {', '.join(values)}") from None


def launch(config: Config, *, fresh: bool = False) -> Run | None:
    """Train `config` in this process. Gives the run, or None when it was finished already."""
    from kenotron.config import refuse_unsupported
    from kenotron.parallel.device import best_device
    from kenotron.parallel.mesh import build_mesh
    from kenotron.train import train

    refuse_unsupported(config)
    ranks = ranks_from_environment()
    needed = config.parallelism.world_size
    if ranks.world_size != needed:
        layout = config.parallelism
        raise InputError(
            f"parallelism: dp {layout.dp} x pp {layout.pp} x tp {layout.tp} x cp {layout.context_parallel_size} needs "
            f"{needed} processes, but {ranks.world_size} were started"
        )
    device = best_device(ranks.local_rank)
    start_process_group(ranks, device)
    degrees = {"dp_shard": config.parallelism.dp, "pp": config.parallelism.pp, "tp": config.parallelism.tp}
    return train(config, build_mesh(degrees, ranks.world_size, device.type), device, fresh=fresh)


def start_process_group(ranks: Ranks, device: torch.device) -> None:
    """The default group of all ranks; a process alone has nobody to talk to, and needs none."""
    import torch.distributed as dist

    from kenotron.parallel.device import backend

    if ranks.world_size > 1 and not dist.is_initialized():
        dist.init_process_group(backend(device))
