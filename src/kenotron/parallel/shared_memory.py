"""Collectives between ranks of one machine through shared memory, which are much faster than gloo's sockets.

Each rank has two slots in the memory, used in turn. A sum is one round: write, announce, wait for the others, add.

    rank 0   x ──copy──▶ slot 0 ┐  announces round 7, waits ┌──▶ slot 0 + slot 1 ──▶ x
    rank 1   x ──copy──▶ slot 1 ┘  announces round 7, waits └──▶ slot 0 + slot 1 ──▶ x

All ranks add in the same order, so their sums are bitwise equal. Round 8 uses the other pair of slots. Round 9 reuses
the slots of round 7: a rank begins it when all have announced round 8, and so have read round 7.

x86 processors guarantee that a rank which sees an announcement also sees everything written before it. On other
processors, and for ranks on several machines, `collectives_in_memory` uses gloo. Waiting has no time limit:
`launch.failures` ends it by `abandon` when another rank has failed, and `launch.hangs` reports a rank that hangs.
"""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.kernels.cores import cores_by_affinity
from kenotron.parallel import collectives
from kenotron.parallel.mesh import Mesh

PLACE_BYTES = 512 << 10  # of one rank's slot in one round: fits in the caches of its core
MOST_RANKS = 4  # each rank reads all slots, unlike in gloo's ring
LINE_BYTES = 64  # announcements of two ranks never share a cache line
SPIN_S = 0.002
SLEEP_S = 0.0001
IN_MEMORY = " in memory"  # suffix of a group's name, since these rounds are counted separately from torch's

_open: WeakSet[MemoryGroup] = WeakSet()


class MemoryGroup:
    """Collectives of the ranks of `group`, which share `memory`: `bytes_needed(group.size())` of zeros."""

    def __init__(self, group: dist.ProcessGroup, memory: Tensor) -> None:
        self.name, self.rank, self.size = group.group_name, group.rank(), group.size()
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        self.spins = ranks_here <= cores_by_affinity()
        announcements = memory[: self.size * LINE_BYTES].view(torch.int64).view(self.size, -1)
        self.announced = announcements[:, 0].numpy()
        self.places = memory[self.size * LINE_BYTES :].view(2, self.size, PLACE_BYTES)
        self.typed: dict[torch.dtype, list[list[Tensor]]] = {}  # round % 2 → rank → slot
        self.round = self.calls = 0
        self.operation, self.called_ns, self.waits, self.abandoned = "", 0, False, False
        _open.add(self)

    def sum(self, x: Tensor) -> Tensor:
        """Make x the sum of every rank's x, in place, and return it."""
        flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)
        with self._call("all_reduce"):
            for part in flat.split(PLACE_BYTES // x.element_size()):
                self._add(self._exchange(part), part)
        return x if x.is_contiguous() else x.copy_(flat.view(x.shape))

    def gather(self, x: Tensor) -> Tensor:
        """Return x ``[n, ...]`` of every rank, in rank order: ``[n * ranks, ...]``."""
        every = x.new_empty(self.size * len(x), *x.shape[1:])
        size = PLACE_BYTES // x.element_size()
        with self._call("all_gather"):
            for part, into in zip(x.view(-1).split(size), every.view(self.size, -1).split(size, 1), strict=True):
                torch.stack(self._exchange(part), out=into)
        return every

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows ``[n / ranks, ...]`` of the sum of every rank's x ``[n, ...]``."""
        rows = x.new_empty(len(x) // self.size, *x.shape[1:])
        size = PLACE_BYTES // self.size // x.element_size()
        with self._call("reduce_scatter"):
            for part, into in zip(x.view(self.size, -1).split(size, 1), rows.view(-1).split(size), strict=True):
                self._add([place[self.rank] for place in self._exchange(part)], into)
        return rows

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrite x with the x of rank `source` of the group, and return it."""
        with self._call("broadcast"):
            for part in x.view(-1).split(PLACE_BYTES // x.element_size()):
                part.copy_(self._exchange(part)[source])
        return x

    @contextmanager
    def _call(self, operation: str) -> Iterator[None]:
        self.calls, self.operation, self.called_ns, self.waits = self.calls + 1, operation, time.time_ns(), True
        with torch.no_grad():
            yield
        self.waits = False

    def _exchange(self, part: Tensor) -> list[Tensor]:
        """Return every rank's `part`, all of one shape; they must be read before the next round."""
        self.round += 1
        places = [place[: part.numel()].view(part.shape) for place in self._places(part.dtype)[self.round % 2]]
        places[self.rank].copy_(part)
        self.announced[self.rank] = self.round
        self._wait()
        return places

    def _add(self, parts: list[Tensor], into: Tensor) -> None:
        torch.add(parts[0], parts[1], out=into)
        for part in parts[2:]:
            into.add_(part)

    def _places(self, dtype: torch.dtype) -> list[list[Tensor]]:
        if dtype not in self.typed:
            self.typed[dtype] = [list(places) for places in self.places.view(dtype)]
        return self.typed[dtype]

    def _wait(self) -> None:
        """Wait until all ranks have announced this round."""
        announced, since = self.announced, 0.0
        for other in range(self.size):
            while announced[other] < self.round:
                now = time.perf_counter()
                since = since or now
                if not self.spins or now - since > SPIN_S:
                    time.sleep(SLEEP_S)
                    if self.abandoned:
                        raise dist.DistBackendError("another rank has failed")


def abandon() -> None:
    """Make present and future collectives that wait for other ranks raise `dist.DistBackendError`."""
    for memory in list(_open):
        memory.abandoned = True


def last_calls() -> list[dict[str, Any]]:
    """Return the last collective of every group, with the flight recorder's fields that `launch.hangs` reads."""
    return [
        {
            "process_group": [memory.name + IN_MEMORY],
            "collective_seq_id": memory.calls,
            "profiling_name": memory.operation,
            "time_created_ns": memory.called_ns,
            "waits": memory.waits,
        }
        for memory in list(_open)
        if memory.calls
    ]


@contextmanager
def collectives_in_memory(mesh: Mesh) -> Iterator[None]:
    """Make `parallel.collectives` use shared memory for groups of `mesh` that can. Every rank enters it."""
    names = []
    try:
        for axis in ("tp", "gradient", "expert_gradient"):
            group = mesh.group(axis)
            if group is None or group.size() > MOST_RANKS or group.group_name in collectives.in_memory:
                continue
            memory = share(group, bytes_needed(group.size()))
            if memory is not None:
                collectives.in_memory[group.group_name] = MemoryGroup(group, memory)
                names.append(group.group_name)
        yield
    finally:
        for name in names:
            del collectives.in_memory[name]


def bytes_needed(ranks: int) -> int:
    """Return the size of a `MemoryGroup`'s memory."""
    return ranks * (LINE_BYTES + 2 * PLACE_BYTES)


def share(group: dist.ProcessGroup, size: int) -> Tensor | None:
    """Return `size` bytes of zeros that all ranks of `group` map; None on all of them if one cannot."""
    memory, descriptor, found = None, None, [("", "")]
    try:
        if group.rank() == 0 and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create"):
            with suppress(OSError):
                descriptor = os.memfd_create(f"kenotron-{uuid.uuid4().hex}")  # a killed process leaves no file
                os.posix_fallocate(descriptor, 0, size)  # fails now: a later write would be a bus error
                place = f"/proc/{os.getpid()}/fd/{descriptor}"
                found = [(place, os.readlink(place))]
        dist.broadcast_object_list(found, group=group, group_src=0)
        with suppress(OSError, RuntimeError):
            if os.readlink(found[0][0]) == found[0][1]:  # else rank 0 is on another machine
                memory = torch.from_file(found[0][0], shared=True, size=size, dtype=torch.uint8)
        have = torch.tensor(int(memory is not None))
        dist.all_reduce(have, op=dist.ReduceOp.MIN, group=group)
    finally:
        if descriptor is not None:
            os.close(descriptor)  # the memory lives until the last rank has unmapped it
    return memory if have else None
