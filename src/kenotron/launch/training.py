"""Training as ranks run it: with what it does not know itself, readers of Hugging Face models and observers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kenotron import interop, training
from kenotron.launch.environment import ranks_from_environment
from kenotron.launch.shared_folder import check_shared
from kenotron.observers import observers
from kenotron.parallel.ranks import run_on_rank0
from kenotron.training import compare, restart

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh
    from kenotron.training.run import Run


def train(config: Config, mesh: Mesh, device: torch.device, *, fresh: bool = False, reopen: bool = False) -> Run | None:
    """`kenotron.training.train`, after the architecture was resolved and several machines were found to share files."""
    ranks = ranks_from_environment()
    if ranks.local_world_size < ranks.world_size:
        check_shared(Path(config.checkpoints.checkpoints_path))
    config = run_on_rank0(lambda: interop.resolve_architecture(config))
    return training.train(
        config,
        mesh,
        device,
        fresh=fresh,
        reopen=reopen,
        open_weights=interop.initial_tensors,
        start_elsewhere=restart.start_elsewhere,
        observers=observers(config, mesh),
    )


def record(config: Config, mesh: Mesh, device: torch.device, *, steps: int, seed: int, folder: str) -> None:
    """`kenotron.training.compare.record`, the architecture resolved first."""
    config = run_on_rank0(lambda: interop.resolve_architecture(config))
    compare.record(config, mesh, device, steps=steps, seed=seed, folder=folder, open_weights=interop.initial_tensors)
