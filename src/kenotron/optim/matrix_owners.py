"""Gather sharded matrices, each on one owner rank, for updates that need the whole matrix.

Two ranks have the upper and lower halves of A and B; rank 0 owns A, rank 1 owns B:

    rank 0   A0 B0  ──▶  A0 A1 = A ─ work ─▶ A'  ──▶  A0' B0'
                 all-to-all                  all-to-all
    rank 1   A1 B1  ──▶  B0 B1 = B ─ work ─▶ B'  ──▶  A1' B1'

Every matrix is updated once, by one rank, as a plain tensor like in a single process, so the result does not depend on
the layout; the work is balanced over ranks. A matrix that is also replicated (hybrid) has one owner among all ranks
that hold any of it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from kenotron.parallel.shards import block_of

Block = tuple[slice, ...]


def in_rounds(sizes: Sequence[int], owner: Sequence[int], limit: int) -> list[list[int]]:
    """Return indices in rounds, in which no owner gets more than `limit` elements, unless it is a single matrix."""
    rounds: list[list[int]] = []
    at: dict[int, tuple[int, int]] = {}  # owner → its current round, and the elements in it
    for index, (size, who) in enumerate(zip(sizes, owner, strict=True)):
        number, filled = at.get(who, (0, 0))
        if filled and filled + size > limit:
            number, filled = number + 1, 0
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
        at[who] = (number, filled + size)
    return rounds


class Exchange:
    """The two all-to-alls for some DTensors of one mesh, the i-th owned by rank ``owner[i]`` of `group`.

    `group` has the ranks of the tensors' mesh, all of which must call `gather` and then `scatter`. Messages have the
    dtype `dtype`, for any dtype of the tensors.
    """

    def __init__(
        self, tensors: Sequence[Any], owner: Sequence[int], group: dist.ProcessGroup, dtype: torch.dtype
    ) -> None:
        self.group, self.rank, self.dtype = group, dist.get_rank(group), dtype
        self.device = tensors[0].to_local().device
        places = _places(tensors[0].device_mesh.mesh, group)
        self.shapes = [tuple(tensor.shape) for tensor in tensors]
        self.blocks = [_blocks(tensor, places) for tensor in tensors]  # by tensor, by rank
        self.senders = [_senders(blocks, who) for blocks, who in zip(self.blocks, owner, strict=True)]
        self.owned = [[i for i, who in enumerate(owner) if who == rank] for rank in range(len(places))]  # by rank
        self.owned_shapes = [self.shapes[i] for i in self.owned[self.rank]]  # of what this rank makes whole

    def gather(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Send this rank's blocks, in the order of the tensors; return the whole tensors that it owns."""
        out = [[shards[i] for i in owned if self.rank in self.senders[i]] for owned in self.owned]
        mine = self.owned[self.rank]
        come = [[i for i in mine if rank in self.senders[i]] for rank in range(len(self.owned))]
        wholes = {i: torch.empty(self.shapes[i], dtype=self.dtype, device=self.device) for i in mine}
        views = [[wholes[i][self.blocks[i][rank]] for i in some] for rank, some in enumerate(come)]
        self._swap(out, views)
        return list(wholes.values())

    def scatter(self, wholes: Sequence[Tensor]) -> list[Tensor]:
        """Send the whole tensors that this rank owns; return its blocks of all of them, in the order of the tensors."""
        mine = self.owned[self.rank]
        out = [
            [whole[self.blocks[i][rank]] for i, whole in zip(mine, wholes, strict=True)]
            for rank in range(len(self.owned))
        ]
        shards = [
            torch.empty(_shape(blocks[self.rank]), dtype=self.dtype, device=self.device) for blocks in self.blocks
        ]
        self._swap(out, [[shards[i] for i in owned] for owned in self.owned])
        return shards

    def _swap(self, out: list[list[Tensor]], into: list[list[Tensor]]) -> None:
        """Run one all-to-all: `out` is what goes to every rank, `into` what comes from each, to be filled."""
        sent = torch.cat([self._empty(0), *(tensor.to(self.dtype).reshape(-1) for some in out for tensor in some)])
        out_sizes, into_sizes = ([sum(t.numel() for t in some) for some in side] for side in (out, into))
        received = self._empty(sum(into_sizes))
        dist.all_to_all_single(received, sent, into_sizes, out_sizes, group=self.group)
        targets = [tensor for some in into for tensor in some]
        for target, piece in zip(targets, received.split([tensor.numel() for tensor in targets]), strict=True):
            target.copy_(piece.view(target.shape))

    def _empty(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device)


def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks of a device mesh as one group; it is made at every call when the mesh has several axes."""
    if mesh.ndim == 1:
        return mesh.get_group()
    return dist.new_group(sorted(mesh.mesh.flatten().tolist()), use_local_synchronization=True)


def _places(mesh: Tensor, group: dist.ProcessGroup) -> list[list[int]]:
    """Return the coordinates of each rank of `group` in the mesh."""
    return [(mesh == rank).nonzero()[0].tolist() for rank in dist.get_process_group_ranks(group)]


def _blocks(tensor: Any, places: list[list[int]]) -> list[Block]:
    """Return each rank's block of `tensor`, as slices."""
    degrees = tensor.device_mesh.shape
    blocks = []
    for place in places:
        offset, shape = block_of(tuple(tensor.shape), degrees, place, tensor.placements)
        blocks.append(tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True)))
    return blocks


def _senders(blocks: list[Block], owner: int) -> set[int]:
    """Return ranks whose distinct blocks make up the tensor, preferring the owner among ranks with the same block."""
    holders: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in [owner, *range(len(blocks))]:
        holders.setdefault(tuple((part.start, part.stop) for part in blocks[rank]), rank)
    return set(holders.values())


def _shape(block: Block) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in block)
