"""Training as ranks run it: with what it does not know itself, readers of Hugging Face models and observers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron import interop, training
from kenotron.config.errors import InputError
from kenotron.launch.environment import ranks_from_environment
from kenotron.launch.machine_limits import machine_limits
from kenotron.launch.shared_folder import check_shared
from kenotron.observers import observers
from kenotron.parallel.ranks import rank_and_size, run_on_rank0, wait_for_all
from kenotron.training import compare, restart

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh
    from kenotron.training.run import Run


def train(config: Config, mesh: Mesh, device: torch.device, *, fresh: bool = False, reopen: bool = False) -> Run | None:
    """`kenotron.training.train`, after several machines were found to share files, the architecture was resolved and
    remote checkpoints were fetched."""
    ranks = ranks_from_environment()
    if ranks.local_world_size < ranks.world_size:
        check_shared(config.checkpoint_folder)
        if config.checkpoints.local is not None:
            check_shared(Path(config.checkpoints.local.path), "checkpoints.local.path")
    with machine_limits(config):
        config = run_on_rank0(lambda: interop.resolve_architecture(config))
        fetch_checkpoints(config, fresh)
        run = training.train(
            config,
            mesh,
            device,
            fresh=fresh,
            reopen=reopen,
            open_weights=interop.initial_tensors,
            start_elsewhere=restart.start_elsewhere,
            observers=observers(config, mesh),
        )
    if mesh.is_first and config.upload_url is not None and (run is None or run.last_result is None):
        from kenotron.observers.uploads import finish, uploader

        rest = uploader(config, config.upload_url)  # the run was finished before; its uploads may not be
        rest[0].start()
        finish(*rest)
    return run


def fetch_checkpoints(config: Config, fresh: bool) -> None:
    """Fetch what a run with remote checkpoints begins from, on rank 0, however long that takes; all ranks call it.

    The ranks share a file system, as they do for the checkpoints themselves. Raises InputError on all of them.
    """
    if not config.begins_remote:
        return
    from kenotron.checkpoint.remote import fetch_for_run

    def on_rank0() -> None:
        if problem is not None:
            raise problem

    problem: InputError | None = None
    if rank_and_size()[0] == 0:
        try:
            quiet = config.logging.log_level not in ("debug", "info")
            fetch_for_run(
                config,
                fresh,
                report=lambda line: print(f"warning: {line}", file=sys.stderr, flush=True),
                say=lambda line: None if quiet else print(line, flush=True),
            )
        except InputError as error:
            problem = error
    wait_for_all()
    run_on_rank0(on_rank0)


def record(config: Config, mesh: Mesh, device: torch.device, *, steps: int, seed: int, folder: str) -> None:
    """`kenotron.training.compare.record`, the architecture resolved first."""
    config = run_on_rank0(lambda: interop.resolve_architecture(config))
    compare.record(config, mesh, device, steps=steps, seed=seed, folder=folder, open_weights=interop.initial_tensors)
