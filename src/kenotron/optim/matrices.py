"""The base of optimizers whose updates need whole matrices, with any sharding.

A matrix that is whole on a rank is updated there, in a batch with others of its shape. A matrix that is sharded over
ranks is gathered on one of them, its owner, with the state that the update needs, and every rank receives its shard of
the result (`matrix_owners.Exchange`):

    rank 0   upper half ─┐               ┌─▶ upper half
                         ├─▶ owner: f ───┤                     updates do not depend on the layout
    rank 1   lower half ─┘               └─▶ lower half

The weights of experts, ``[experts, rows, columns]``, are one matrix per expert. Ranks that shard them by experts have
whole matrices, and update them locally.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kenotron.optim.matrix_owners import Exchange, in_rounds, mesh_group
from kenotron.optim.own import OwnOptimizer
from kenotron.parallel.ranks import balance
from kenotron.parallel.shards import block_of, local_tensor

BATCH_ELEMENTS = 2**22  # limit of elements that are updated together: 8 MB in bfloat16
ON_A_GPU = 16  # times as many there, where a product of a few matrices of 2,048 x 2,048 is one launch


class Batch:
    """Matrices that are updated together: whole and of one shape, or with `owner`, sharded over ranks of `group`.

    `parameters` are ``[rows, columns]`` or ``[experts, rows, columns]``; the i-th belongs to rank ``owner[i]``.
    """

    def __init__(self, parameters: list[Tensor], owner: Sequence[int] = (), group: Any = None) -> None:
        self.parameters, self.owner, self.group = parameters, owner, group
        self._exchanges: dict[str, Exchange] = {}

    def wholes(self, kind: str, like: list[Tensor], shards: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return stacks ``[n, rows, columns]`` in `dtype` of the whole tensors that this rank updates.

        `shards` are this rank's shards of tensors that are sharded like `like`, always the same for a `kind`.
        """
        if not self.owner:
            one = [shard.to(dtype) for shard in shards]
            return [torch.cat(one) if one[0].ndim == 3 else torch.stack(one)]
        if kind not in self._exchanges:
            self._exchanges[kind] = Exchange(like, self.owner, self.group, dtype)
        return [whole if whole.ndim == 3 else whole[None] for whole in self._exchanges[kind].gather(shards)]

    def shards(self, kind: str, stacks: list[Tensor]) -> list[Tensor]:
        """Return this rank's shards of all ranks' stacks, the inverse of `wholes`."""
        if not self.owner:
            experts = local_tensor(self.parameters[0]).shape[0] if self.parameters[0].ndim == 3 else None
            return list(stacks[0].unbind() if experts is None else stacks[0].split(experts))
        exchange = self._exchanges[kind]
        whole = [stack if len(shape) == 3 else stack[0] for stack, shape in zip(stacks, exchange.owned_shapes)]
        return exchange.scatter(whole)


class MatrixOptimizer(OwnOptimizer):
    """The base class: a subclass defines the state of a parameter, and updates a batch.

    Parameters must have two dimensions, or three of which the first counts experts. They may be DTensors, in a group
    over one mesh: then every rank of the mesh must step.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._planned: dict[tuple[int, ...], list[Batch]] = {}
        self._groups: dict[Any, Any] = {}  # one per mesh: restoring state uses one matrix at a time
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim not in (2, 3):
                    raise ValueError(f"{type(self).__name__}: expected matrices, found shape {tuple(parameter.shape)}")

    def update_batch(self, batch: Batch, group: dict[str, Any]) -> None:
        """Take one step for the parameters of a batch."""
        raise NotImplementedError

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take one step for the parameters of a group, in batches."""
        for batch in self._batches(parameters):
            self.update_batch(batch, group)

    def states(self, batch: Batch, key: str) -> list[Tensor]:
        """Return the state `key` of a batch's parameters."""
        return [self.state[parameter][key] for parameter in batch.parameters]

    def _batches(self, parameters: list[Tensor]) -> list[Batch]:
        key = tuple(map(id, parameters))
        if key not in self._planned:
            here = [parameter for parameter in parameters if whole_here(parameter)]
            self._planned[key] = [*_same_shape(here), *self._rounds([p for p in parameters if not whole_here(p)])]
        return self._planned[key]

    def _rounds(self, parameters: list[Tensor]) -> Iterator[Batch]:
        """Yield rounds in which all ranks own about equal work, at most `elements_together` or one matrix."""
        if not parameters:
            return
        mesh: Any = parameters[0].device_mesh  # type: ignore[attr-defined]
        if mesh not in self._groups:
            self._groups[mesh] = mesh_group(mesh)
        owner = balance([p.numel() * min(p.shape[-2:]) for p in parameters], mesh.size())
        for indices in in_rounds([p.numel() for p in parameters], owner, elements_together(parameters[0])):
            yield Batch([parameters[i] for i in indices], [owner[i] for i in indices], self._groups[mesh])


def elements_together(parameter: Tensor) -> int:
    """Return the limit of elements that are updated together with `parameter`, on its device."""
    return BATCH_ELEMENTS if parameter.device.type == "cpu" else ON_A_GPU * BATCH_ELEMENTS


def whole_here(parameter: Tensor) -> bool:
    """Return whether each matrix that this rank has a shard of is whole on this rank."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.size() == 1:
        return True
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    return parameter.ndim == 3 and all(getattr(placement, "dim", 0) == 0 for placement in placements)


def zeros_beside(parameter: Tensor, rows: int, columns: int) -> Tensor:
    """Return zeros ``[rows, columns]`` per matrix, sharded like `parameter` by experts and rows, never by columns.

    If the matrix has another number of rows than the state, a split of its rows splits the state's rows evenly.
    """
    shape = (*parameter.shape[:-2], rows, columns)
    if not hasattr(parameter, "placements"):
        return parameter.new_zeros(shape)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    placements: list[Any] = []
    for placement in parameter.placements:
        dim = getattr(placement, "dim", None)
        in_matrix = dim is not None and dim >= parameter.ndim - 2
        if in_matrix and (rows != parameter.shape[-2] or dim == parameter.ndim - 1):
            placement = Replicate() if columns == 1 else Shard(parameter.ndim - 2)
        placements.append(placement)
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    block = block_of(shape, mesh.shape, mesh.get_coordinate(), placements)[1]
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    local = local_tensor(parameter).new_zeros(block)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def _same_shape(parameters: list[Tensor]) -> Iterator[Batch]:
    """Yield batches of one local shape, of at most `elements_together` or one parameter."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if local_tensor(parameter).numel():
            by_shape[local_tensor(parameter).shape].append(parameter)
    for shape, same in by_shape.items():
        size = max(1, elements_together(same[0]) // shape.numel())
        for start in range(0, len(same), size):
            yield Batch(same[start : start + size])
