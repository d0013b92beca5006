"""The mesh of ranks: named axes, of which the last varies fastest, and their process groups.

Eight ranks as pp 2 x dp_shard 2 x tp 2 form this grid, and the groups of an axis are its rows:

    rank = 4 * pp + 2 * dp_shard + tp          tp groups (0 1) (2 3) (4 5) (6 7)
                                         dp_shard groups (0 2) (1 3) (4 6) (5 7)
                                               pp groups (0 4) (1 5) (2 6) (3 7)

`AXES` declares each axis once: how its degree is computed, and which of the `GROUPS` it belongs to. All other code uses
the mesh, by the name of an axis or of a group of axes:

    mesh.group("loss")        the ranks whose losses add up: here pp x dp_shard, ranks (0 2 4 6) and (1 3 5 7)
    mesh.degree("batch")      how many ranks read different samples: 2
    mesh.rank("batch")        this rank's index among them
    mesh.submesh("shard")     the `DeviceMesh` that FSDP2 shards over

Experts of a mixture are laid out over the same ranks differently: the ranks of `gradient`, which hold the same other
weights, are also the axes expert_replicate x expert_shard x ep. For eight ranks at ep 4, the experts are in four parts,
and ZeRO shards each part over the two ranks that have it:

    ranks of gradient   0 1 2 3 │ 4 5 6 7        ep groups (0 1 2 3) (4 5 6 7)
    experts             a b c d │ a b c d        expert_shard groups (0 4) (1 5) (2 6) (3 7)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, gcd, prod
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from kenotron.config.parallelism import HasLayout

GROUPS = {
    "batch": "ranks that read different samples",
    "loss": "ranks whose losses add up to that of the global batch: they see different tokens, or none of the loss",
    "gradient": "ranks that hold the same weights and whose gradients add up",
    "shard": "those of `gradient` among which ZeRO splits weights, gradients and optimizer state",
    "expert_gradient": "ranks that hold the same experts and whose gradients of them add up",
    "model": "ranks that hold one copy of the weights together, and so decode one prompt together",
    "world": "all ranks",
}


@dataclass(frozen=True)
class Axis:
    """One axis of parallelism.

    `degree` computes its size from the config and the number of data-parallel ranks over which ZeRO shards state
    (`sharding_ranks`); `groups` are the `GROUPS` that include it (``world`` includes all axes but those `of_experts`,
    which lay out the ranks of `gradient` a second time).
    """

    name: str
    degree: Callable[[HasLayout, int], int]
    groups: tuple[str, ...] = ()
    of_experts: bool = False


def _expert_shard(config: HasLayout, shard: int) -> int:
    """Return over how many ranks a layer's experts are sharded; 1 if they are sharded like other weights.

    If the ranks divide no dimension, FSDP2 pads the first, the experts, to a multiple of the ranks: for 8 experts, 96
    ranks would each hold a whole expert and gather 96. In groups of 32, each rank holds a quarter of one. The choice
    minimizes what a rank holds, and then what it gathers.
    """
    layout, sizes = config.parallelism, config.expert_sizes
    ep, cp = layout.expert_parallel_size, layout.context_parallel_size
    if config.zero_stage == 0 or not sizes:
        return 1
    ranks = shard * cp if ep == 1 else layout.dp * cp // ep

    def held(group: int) -> float:
        return sizes[0] / group if any(size % group == 0 for size in sizes) else ceil(sizes[0] / group)

    best = min((n for n in range(1, ranks + 1) if ranks % n == 0), key=lambda n: (held(n), n * held(n)))
    return 1 if ep == 1 and best == ranks else best


def _expert_replicate(config: HasLayout, shard: int) -> int:
    layout, of_experts = config.parallelism, _expert_shard(config, shard) * config.parallelism.expert_parallel_size
    return 1 if of_experts == 1 else layout.dp * layout.context_parallel_size // of_experts


AXES = (
    Axis("pp", lambda config, shard: config.parallelism.pp, ("loss", "model")),
    Axis("dp_replicate", lambda config, shard: config.parallelism.dp // shard, ("batch", "loss", "gradient")),
    Axis("dp_shard", lambda config, shard: shard, ("batch", "loss", "gradient", "shard")),
    Axis("cp", lambda config, shard: config.parallelism.context_parallel_size, ("loss", "gradient", "shard")),
    Axis("expert_replicate", _expert_replicate, ("expert_gradient",), of_experts=True),
    Axis("expert_shard", _expert_shard, ("expert_gradient",), of_experts=True),
    Axis("ep", lambda config, shard: config.parallelism.expert_parallel_size, of_experts=True),
    Axis("tp", lambda config, shard: config.parallelism.tp, ("model",)),
)
NAMES = tuple(axis.name for axis in AXES if not axis.of_experts)
EXPERT_NAMES = tuple(axis.name for axis in AXES if axis.of_experts)


def axes_of(name: str) -> tuple[str, ...]:
    """Return the axes, slowest first, of a group of `GROUPS`, or an axis itself. Raises `KeyError`."""
    if name in (known := [axis.name for axis in AXES]):
        return (name,)
    if name not in GROUPS:
        raise KeyError(f"mesh: expected an axis ({', '.join(known)}) or a group ({', '.join(GROUPS)}), found {name!r}")
    return NAMES if name == "world" else tuple(axis.name for axis in AXES if name in axis.groups)


@dataclass(frozen=True)
class Mesh:
    """Degrees by axis (missing ones are 1), and the device meshes of those larger than 1 (None when all are 1).

    `expert_mesh` has the axes of experts instead of those of `gradient`. Each method takes the name of an axis or of a
    group of axes.
    """

    degrees: Mapping[str, int] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    _submeshes: dict[str, DeviceMesh] = field(default_factory=dict, compare=False, repr=False)

    def degree(self, name: str) -> int:
        """Return the number of ranks in each group of `name`."""
        return prod(self.degrees.get(axis, 1) for axis in axes_of(name))

    def rank(self, name: str) -> int:
        """Return this process's rank in its group of `name`, row-major over the axes; 0 at degree 1."""
        rank = 0
        for axis in self.larger(name):
            mesh = self.expert_mesh if axis in EXPERT_NAMES else self.device_mesh
            assert mesh is not None
            rank = rank * self.degree(axis) + mesh.get_local_rank(axis)
        return rank

    def group(self, name: str) -> dist.ProcessGroup | None:
        """Return this rank's process group of `name`; None at degree 1."""
        mesh = self.submesh(name)
        return None if mesh is None else mesh.get_group()

    def submesh(self, name: str) -> DeviceMesh | None:
        """Return this rank's group of `name` as a device mesh with one axis; None at degree 1."""
        larger = self.larger(name)
        whole = self.expert_mesh if set(larger) & set(EXPERT_NAMES) else self.device_mesh
        if whole is None or not larger:
            return None
        if name not in self._submeshes:
            from kenotron.parallel.torch_internals import flatten

            self._submeshes[name] = whole[larger[0]] if len(larger) == 1 else flatten(whole, larger)
        return self._submeshes[name]

    def larger(self, name: str) -> tuple[str, ...]:
        """Return the axes of `name` that are larger than 1."""
        return tuple(axis for axis in axes_of(name) if self.degree(axis) > 1)

    def represents(self, name: str, within: str) -> bool:
        """Return whether this rank is rank 0 along the axes of `within` that are not in `name`.

        Among the ranks of a `within` group with the same rank in `name`, exactly one represents the others: a sum over
        ``loss`` counts a sample once if only ranks that represent ``batch`` add it.
        """
        return all(self.rank(axis) == 0 for axis in axes_of(within) if axis not in axes_of(name))

    @property
    def world_size(self) -> int:
        """The number of ranks of the run."""
        return self.degree("world")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the run, which logs and writes files."""
        return self.rank("world") == 0


def axes(config: HasLayout, ranks_on_machine: int = 1) -> dict[str, int]:
    """Return the degree of every axis on this layout; `ranks_on_machine` consecutive ranks share a machine."""
    shard = sharding_ranks(config, ranks_on_machine)
    return {axis.name: axis.degree(config, shard) for axis in AXES}


def sharding_ranks(config: HasLayout, ranks_on_machine: int = 1) -> int:
    """Return the number of data-parallel ranks over which `zero_stage` shards state; other ranks hold replicas.

    With zero_stage hybrid a group has as many model replicas (cp x tp ranks) as fit into one machine. If they do not
    fill machines evenly, a group is one replica.
    """
    layout = config.parallelism
    if config.zero_stage == 0:
        return 1
    if layout.dp_shard is None and config.zero_stage == "hybrid":
        replicas_on_machine, over = divmod(ranks_on_machine, layout.context_parallel_size * layout.tp)
        return 1 if over else gcd(layout.dp, replicas_on_machine)
    return layout.dp_shard or layout.dp


def build_mesh(degrees: Mapping[str, int], world_size: int, device_type: str) -> Mesh:
    """Build the mesh of `degrees` over `world_size` ranks; missing axes are 1, `expert_replicate` is what remains.

    The default process group must exist if there are several ranks.

    It creates the process groups of all `GROUPS`, so every rank calls it. Raises `InputError` if the product of the
    degrees is not `world_size`, or ep does not divide the ranks of `gradient`.
    """
    full = {axis.name: degrees.get(axis.name, 1) for axis in AXES}
    mesh = Mesh(full)
    if mesh.world_size != world_size:
        arithmetic = " x ".join(f"{axis} {full[axis]}" for axis in NAMES)
        raise InputError(f"parallelism: {arithmetic} = {mesh.world_size} ranks, but {world_size} were started")
    if world_size == 1:
        return mesh
    equal = mesh.degree("gradient")
    if full["ep"] > 1 and not {"expert_replicate", "expert_shard"} & set(degrees):
        full["expert_replicate"] = equal // full["ep"]
    experts = prod(full[axis] for axis in EXPERT_NAMES)
    if experts not in (1, equal):
        raise InputError(f"parallelism.expert_parallel_size: expected a divisor of dp x cp {equal}, found {full['ep']}")
    expert_mesh = None
    if experts > 1:
        expert_mesh = _device_mesh(full, [axis.name for axis in AXES if "gradient" not in axis.groups], device_type)
    mesh = Mesh(full, _device_mesh(full, NAMES, device_type), expert_mesh)
    for name in GROUPS:
        mesh.group(name)
    return mesh


def _device_mesh(degrees: Mapping[str, int], names: Sequence[str], device_type: str) -> DeviceMesh:
    """Return the device mesh of the axes `names` that are larger than 1, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    larger = {name: degrees[name] for name in names if degrees[name] > 1}
    return init_device_mesh(device_type, tuple(larger.values()), mesh_dim_names=tuple(larger))
