"""Who talks to whom: named axes of ranks, tp fastest.

Eight ranks as pp 2 x dp_shard 2 x tp 2 sit in this grid, and each axis is a set of rows:

    rank = 4 * pp + 2 * dp_shard + tp          tp groups (0 1) (2 3) (4 5) (6 7)
                                         dp_shard groups (0 2) (1 3) (4 6) (5 7)
                                               pp groups (0 4) (1 5) (2 6) (3 7)

The ``DeviceMesh`` holds only axes larger than 1, because torch creates process groups for size-1 axes too; `Mesh`
answers for every axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from kenotron.config import Config

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Degrees by axis, and the device mesh of those larger than 1 (None when all are 1)."""

    degrees: dict[str, int]
    device_mesh: DeviceMesh | None = None

    def degree(self, axis: str) -> int:
        return self.degrees[axis]

    def rank(self, axis: str) -> int:
        """This process's place along `axis`; 0 at degree 1."""
        if self.device_mesh is None or self.degree(axis) == 1:
            return 0
        return self.device_mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of `axis` through this rank; None at degree 1: nobody to talk to."""
        if self.device_mesh is None or self.degree(axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def world_size(self) -> int:
        return prod(self.degrees.values())

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the run: the one that speaks and writes."""
        return all(self.rank(axis) == 0 for axis in AXES)

    @property
    def dp_degree(self) -> int:
        return self.degree("dp_replicate") * self.degree("dp_shard")

    @property
    def dp_rank(self) -> int:
        return self.rank("dp_replicate") * self.degree("dp_shard") + self.rank("dp_shard")


def axes(config: Config, ranks_on_machine: int = 1) -> dict[str, int]:
    """The degree of every axis: dp splits into groups that shard what zero_stage says, and copies of such groups.

    The groups of zero_stage hybrid stay within one machine of `ranks_on_machine` consecutive ranks: as many replicas
    as fit there. Where cp x tp ranks do not fill machines evenly, a group is one replica.
    """
    layout = config.parallelism
    degrees = {"pp": layout.pp, "cp": layout.context_parallel_size, "tp": layout.tp}
    if config.zero_stage == 0:
        return degrees | {"dp_replicate": layout.dp, "dp_shard": 1}
    shard = layout.dp_shard
    if shard is None and config.zero_stage == "hybrid":
        replicas_on_machine, over = divmod(ranks_on_machine, degrees["cp"] * degrees["tp"])
        shard = 1 if over else gcd(layout.dp, replicas_on_machine)
    shard = shard or layout.dp
    return degrees | {"dp_replicate": layout.dp // shard, "dp_shard": shard}


def build_mesh(degrees: dict[str, int], world_size: int, device_type: str) -> Mesh:
    """A mesh of `degrees` (missing axes are 1) over `world_size` ranks; the default group must exist if > 1."""
    full = {axis: degrees.get(axis, 1) for axis in AXES}
    if prod(full.values()) != world_size:
        arithmetic = " x ".join(f"{axis} {degree}" for axis, degree in full.items())
        raise InputError(f"parallelism: {arithmetic} = {prod(full.values())} ranks, but {world_size} were started")
    larger = {axis: degree for axis, degree in full.items() if degree > 1}
    if not larger:
        return Mesh(full)
    from torch.distributed.device_mesh import init_device_mesh

    device_mesh = init_device_mesh(device_type, tuple(larger.values()), mesh_dim_names=tuple(larger))
    return Mesh(full, device_mesh)
