"""Which ranks communicate with which: named axes of ranks, the last one fastest.

Eight ranks as pp 2 x dp_shard 2 x tp 2 form this grid, and the groups of an axis are its rows:

    rank = 4 * pp + 2 * dp_shard + tp          tp groups (0 1) (2 3) (4 5) (6 7)
                                         dp_shard groups (0 2) (1 3) (4 6) (5 7)
                                               pp groups (0 4) (1 5) (2 6) (3 7)

`AXES` declares each axis once: where its degree comes from and which of the `GROUPS` it belongs to. Everything else
asks the mesh, by the name of an axis or of a group of axes:

    mesh.group("loss")        the ranks whose losses add up: here pp x dp_shard, ranks (0 2 4 6) and (1 3 5 7)
    mesh.degree("batch")      how many ranks read different samples: 2
    mesh.rank("batch")        which of them this one is
    mesh.submesh("shard")     the `DeviceMesh` that FSDP2 shards over

Experts of a mixture are laid out over the same ranks in another way, by axes that count the ranks of `gradient`, which
all hold the same other weights, once more: expert_replicate x expert_shard x ep. Eight at ep 4, the experts in four
parts, ZeRO splits each part over the two ranks that have it:

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
    """One way of splitting a run over ranks.

    `degree` computes its size from the config and the number of data-parallel ranks among which ZeRO splits state
    (`sharding_ranks`); `groups` are those of `GROUPS` that run along it (``world`` runs along all that are not
    `of_experts`, which count the ranks of `gradient` once more).
    """

    name: str
    degree: Callable[[HasLayout, int], int]
    groups: tuple[str, ...] = ()
    of_experts: bool = False


def _expert_shard(config: HasLayout, shard: int) -> int:
    """The ranks that split a layer's experts among them; 1 also where those are `shard`, as of other weights.

    FSDP2 pads the first dimension, the experts, to a multiple of the ranks where these divide none: 96 ranks would each
    gather 96 of 8 experts, and hold a whole one. In groups of 32, each holds a quarter of one. So: where a rank holds
    least and then gathers least.
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
    """The axes, slowest first, that an axis (itself) or a group of `GROUPS` runs along. Raises `KeyError`."""
    if name in (known := [axis.name for axis in AXES]):
        return (name,)
    if name not in GROUPS:
        raise KeyError(f"mesh: expected an axis ({', '.join(known)}) or a group ({', '.join(GROUPS)}), found {name!r}")
    return NAMES if name == "world" else tuple(axis.name for axis in AXES if name in axis.groups)


@dataclass(frozen=True)
class Mesh:
    """Degrees by axis (missing ones are 1), and the device meshes of those larger than 1 (None when all are 1).

    `expert_mesh` has the axes of experts in the place of those of `gradient`. Each method takes the name of an axis or
    of a group of axes.
    """

    degrees: Mapping[str, int] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    _submeshes: dict[str, DeviceMesh] = field(default_factory=dict, compare=False, repr=False)

    def degree(self, name: str) -> int:
        """Ranks in each group of `name`."""
        return prod(self.degrees.get(axis, 1) for axis in axes_of(name))

    def rank(self, name: str) -> int:
        """This process's number in its group of `name`, row-major over the axes; 0 at degree 1."""
        rank = 0
        for axis in self.larger(name):
            mesh = self.expert_mesh if axis in EXPERT_NAMES else self.device_mesh
            assert mesh is not None
            rank = rank * self.degree(axis) + mesh.get_local_rank(axis)
        return rank

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group of `name` that this rank is in; None at degree 1."""
        mesh = self.submesh(name)
        return None if mesh is None else mesh.get_group()

    def submesh(self, name: str) -> DeviceMesh | None:
        """This rank's group of `name` as a device mesh with one axis; None at degree 1."""
        larger = self.larger(name)
        whole = self.expert_mesh if set(larger) & set(EXPERT_NAMES) else self.device_mesh
        if whole is None or not larger:
            return None
        if name not in self._submeshes:
            from kenotron.parallel.torch_internals import flatten

            self._submeshes[name] = whole[larger[0]] if len(larger) == 1 else flatten(whole, larger)
        return self._submeshes[name]

    def larger(self, name: str) -> tuple[str, ...]:
        """The axes of `name` that are larger than 1."""
        return tuple(axis for axis in axes_of(name) if self.degree(axis) > 1)

    def represents(self, name: str, within: str) -> bool:
        """Whether this rank is rank 0 along the axes of `within` that `name` does not run along.

        Of the ranks of a `within` group that are alike in `name`, exactly one represents the others: a sum over
        ``loss`` counts a sample once if only those that represent ``batch`` add it.
        """
        return all(self.rank(axis) == 0 for axis in axes_of(within) if axis not in axes_of(name))

    @property
    def world_size(self) -> int:
        """All ranks of the run."""
        return self.degree("world")

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the run: the one that logs and writes files."""
        return self.rank("world") == 0


def axes(config: HasLayout, ranks_on_machine: int = 1) -> dict[str, int]:
    """The degree of every axis on this layout; `ranks_on_machine` consecutive ranks share a machine."""
    shard = sharding_ranks(config, ranks_on_machine)
    return {axis.name: axis.degree(config, shard) for axis in AXES}


def sharding_ranks(config: HasLayout, ranks_on_machine: int = 1) -> int:
    """The number of data-parallel ranks among which `zero_stage` splits state; the other ranks hold copies.

    With zero_stage hybrid a group stays within one machine: as many replicas as fit there. Where cp x tp ranks do not
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
    """A mesh of `degrees` over `world_size` ranks; missing axes are 1, `expert_replicate` what ep leaves.

    The default group must exist if there are several.

    Creates the process groups of all `GROUPS`, so every rank calls it. Raises `InputError` where the degrees do not
    multiply to `world_size`, or where ep does not divide the ranks of `gradient`.
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
    """The axes `names` larger than 1, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    larger = {name: degrees[name] for name in names if degrees[name] > 1}
    return init_device_mesh(device_type, tuple(larger.values()), mesh_dim_names=tuple(larger))
