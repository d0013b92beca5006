"""What `kenotron compare` does, on the pool of ranks: a comparison takes a second or two.

comparison = compare_on_ranks(plain, other, folder, steps=4)
"""

from contextlib import nullcontext
from pathlib import Path

import torch

from kenotron.config import Config, refuse_unsupported
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.training.compare import SEEDS, Comparison, Distances, backward_order, distances, judge, record
from mutants.mutant import Mutant
from support.ranks import run_ranks


def rounding_of(plain: Config, folder: Path, steps: int) -> list[Distances]:
    """Train A and the runs whose weights are changed; their distances from A, which stays in `folder`."""
    world = plain.parallelism.world_size
    run_ranks(world, _record, plain, (0, *SEEDS), steps, folder)
    names = backward_order(plain)
    return [distances(folder / "0", folder / str(seed), names) for seed in (0, *SEEDS)]


def compare_on_ranks(
    plain: Config,
    other: Config,
    folder: Path,
    *,
    steps: int = 4,
    measured: list[Distances] | None = None,
    fault: Mutant | None = None,
) -> Comparison:
    """Compare `other` with `plain`, whose runs are `measured` in `folder` already, or made now.

    `fault` is in the code while `other` runs.
    """
    a, *rounding = rounding_of(plain, folder, steps) if measured is None else measured
    run_ranks(other.parallelism.world_size, _record, other, (0,), steps, folder / "b", fault)
    return judge(a, rounding, distances(folder / "0", folder / "b" / "0", list(a.start)))


def _record(
    rank: int, config: Config, seeds: tuple[int, ...], steps: int, folder: Path, fault: Mutant | None = None
) -> None:
    refuse_unsupported(config)
    with nullcontext() if fault is None else fault.in_this_process():
        mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
        for seed in seeds:
            record(config, mesh, torch.device("cpu"), steps=steps, seed=seed, folder=str(folder / str(seed)))
