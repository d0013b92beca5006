"""Files that machines send each other: of a local checkpoint, to whoever needs them.

    machines = Machines((0, 0, 1, 1), rank)                   # ranks 0 and 1 are on machine 0
    machines.send(file, record, source=1, to={0})             # a file of machine 1 to machine 0
    machines.pass_on(folder, manifest, target)                # each machine's folder to the next one, as `target`

The first rank of a machine sends and receives for it, through gloo, in blocks: no more of a file is in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.checkpoint.durable import FileRecord, HashedFile, refusal, write_file
from kenotron.checkpoint.folders import publish
from kenotron.checkpoint.manifest import MANIFEST, parse
from kenotron.config.errors import CheckpointError
from kenotron.parallel.ranks import describe, raise_on_any_rank
from kenotron.storage.files import sync_folder, temporary_beside

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Machines:
    """The machine of each rank, numbered in the order of their first ranks; this process is `rank`."""

    of_rank: tuple[int, ...]
    rank: int
    timeout_seconds: float = 600.0

    @property
    def number(self) -> int:
        """The number of this rank's machine."""
        return self.of_rank[self.rank]

    @property
    def count(self) -> int:
        """The number of machines."""
        return max(self.of_rank) + 1

    def ranks(self, machine: int) -> list[int]:
        """The ranks of a machine, in order."""
        return [rank for rank, number in enumerate(self.of_rank) if number == machine]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its machine, which sends and receives for it."""
        return self.ranks(self.number)[0] == self.rank

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The first ranks of all machines. All ranks ask for it at the same time."""
        import torch.distributed as dist

        first = [self.of_rank.index(machine) for machine in range(self.count)]
        return dist.new_group(first, timeout=timedelta(seconds=self.timeout_seconds), backend="gloo")

    def send(self, file: Path, record: FileRecord, source: int, to: set[int]) -> None:
        """Copy `file`, which has the same name below every machine's folder, from `source` to machines `to`.

        All ranks call it, with their own machine's path. Raises CheckpointError if the file cannot be read or written,
        or what arrives is not what `record` says.
        """
        group = self.group
        raise_on_any_rank(lambda: self._broadcast(group, file, record, source, to) if self.is_first else None)

    def _broadcast(self, group: dist.ProcessGroup, file: Path, record: FileRecord, source: int, to: set[int]) -> None:
        """Every first rank takes part to the end, whatever fails on it: the others wait for it."""
        import torch
        import torch.distributed as dist

        block = torch.empty(min(BLOCK_BYTES, record.bytes), dtype=torch.uint8)
        mine = _Source([file]) if self.number == source else None
        sink = _Sink([(file, record)]) if self.number in to else None
        for start in range(0, record.bytes, BLOCK_BYTES):
            part = block[: min(BLOCK_BYTES, record.bytes - start)]
            if mine is not None:
                mine.fill(part)
            dist.broadcast(part, src=self.of_rank.index(source), group=group)
            if sink is not None:
                sink.take(part)
        for end in (mine, sink):
            if end is not None and (problem := end.close()):
                raise CheckpointError(problem)

    def pass_on(self, folder: Path, text: bytes, target: Path) -> str | None:
        """Send the checkpoint `folder`, of manifest `text`, to the next machine; receive that of the one before.

        It becomes `target`. First ranks call it, in any thread, after all ranks have asked for `group`. Returns what
        went wrong with the files here, if anything did. Raises RuntimeError if another machine is lost.
        """
        import torch
        import torch.distributed as dist

        next_one, before = ((self.number + step) % self.count for step in (1, -1))
        manifest = parse(text, folder / MANIFEST)
        source = _Source([folder / name for name in manifest.files])

        def exchange(sent: Tensor | None, received: Tensor | None) -> None:
            work = None if sent is None else dist.isend(sent, group=self.group, group_dst=next_one)
            if received is not None:
                dist.recv(received, group=self.group, group_src=before)
            if work is not None:
                work.wait()

        length = torch.zeros(1, dtype=torch.int64)
        exchange(torch.tensor([len(text)]), length)
        arriving = torch.zeros(int(length), dtype=torch.uint8)
        exchange(torch.frombuffer(bytearray(text), dtype=torch.uint8), arriving)
        sink = _FolderSink(target, arriving.numpy().tobytes())

        blocks = torch.empty(2, BLOCK_BYTES, dtype=torch.uint8)
        totals = manifest.bytes, parse(sink.text, target / MANIFEST).bytes
        for start in range(0, max(totals), BLOCK_BYTES):
            sent, received = (
                block[: min(BLOCK_BYTES, total - start)] if start < total else None
                for block, total in zip(blocks, totals, strict=True)
            )
            if sent is not None:
                source.fill(sent)
            exchange(sent, received)
            if received is not None:
                sink.take(received)
        ours, theirs = source.close(), sink.close()  # both, whatever the first reports
        return ours or theirs


def machine_of_each(ranks: Sequence[tuple[str, int]]) -> tuple[int, ...]:
    """The machine of each rank, from (host name, number on its machine); one host may play several machines.

    >>> machine_of_each([("a", 0), ("a", 1), ("b", 0), ("b", 1)])      # torchrun
    (0, 0, 1, 1)
    >>> machine_of_each([("a", 0), ("b", 0), ("a", 1), ("b", 1)])      # srun --distribution=cyclic
    (0, 1, 0, 1)
    >>> machine_of_each([("a", 0), ("a", 0)])                          # two of torchrun on one host
    (0, 1)
    """
    newest: dict[str, int] = {}
    numbers = []
    for host, local_rank in ranks:
        if local_rank == 0 or host not in newest:
            newest[host] = max(newest.values(), default=-1) + 1
        numbers.append(newest[host])
    return tuple(numbers)


class _Source:
    """The bytes of `files`, one after another."""

    def __init__(self, files: list[Path]) -> None:
        self.files, self.file = iter(files), open(os.devnull, "rb", buffering=0)  # noqa: SIM115
        self.problem: str | None = None

    def fill(self, block: Tensor) -> None:
        """Read the next bytes into `block`; after an error, none."""
        view = block.numpy().data
        try:
            while view and self.problem is None:
                count = self.file.readinto(view)
                view = view[count:]
                if not count:
                    self.file.close()
                    self.file = open(next(self.files), "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            self.problem = str(refusal("read", Path(error.filename or self.file.name), error))
        except StopIteration:
            self.problem = f"{self.file.name} was truncated"

    def close(self) -> str | None:
        """What went wrong."""
        self.file.close()
        return self.problem


class _Sink:
    """Writes bytes as new files; what arrives must be what their records say."""

    def __init__(self, files: list[tuple[Path, FileRecord]]) -> None:
        self.files, self.left = iter(files), 0
        self.open = ExitStack()
        self.problem: str | None = None

    def take(self, block: Tensor) -> None:
        """Write the next bytes; after an error, none."""
        view = block.numpy().data
        while view and self.problem is None:
            try:
                while not self.left:
                    self._start(*next(self.files))
                self.file.write(view[: self.left])
                count = min(len(view), self.left)
                self.left, view = self.left - count, view[count:]
                if not self.left:
                    self._end()
            except (OSError, CheckpointError) as error:
                self.problem = describe(error)
                with suppress(CheckpointError):  # its disk may be broken
                    self.open.close()

    def _start(self, path: Path, record: FileRecord) -> None:
        self.path, self.record, self.left = path, record, record.bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.open.enter_context(HashedFile(path))
        if not self.left:
            self._end()

    def _end(self) -> None:
        self.open.close()
        if self.file.record != self.record:
            raise CheckpointError(f"{self.path} did not arrive as it was sent")

    def close(self) -> str | None:
        """What went wrong. Files without bytes that come last are made."""
        try:
            for path, record in self.files if self.problem is None else ():
                self._start(path, record)
        except (OSError, CheckpointError) as error:
            self.problem = describe(error)
        with suppress(CheckpointError):
            self.open.close()
        return self.problem


class _FolderSink(_Sink):
    """A checkpoint that arrives: it gets its name `target` once it is complete, unless that exists."""

    def __init__(self, target: Path, text: bytes) -> None:
        self.target, self.temporary, self.text = target, temporary_beside(target), text
        files = parse(text, target / MANIFEST).files.items()
        super().__init__([(self.temporary / name, record) for name, record in files])
        self.needless = False
        with suppress(OSError):
            self.needless = (target / MANIFEST).read_bytes() == text  # in a folder that machines share

    def take(self, block: Tensor) -> None:
        if not self.needless:
            super().take(block)

    def close(self) -> str | None:
        """Give the folder its name. Returns what went wrong."""
        if self.needless or super().close():
            shutil.rmtree(self.temporary, ignore_errors=True)
            return self.problem
        try:
            self.temporary.mkdir(parents=True, exist_ok=True)  # a part may be without files
            write_file(self.temporary / MANIFEST, self.text)
            sync_folder(self.temporary)
            publish(self.temporary, self.target)
        except (OSError, CheckpointError) as error:
            self.problem = describe(error)
            shutil.rmtree(self.temporary, ignore_errors=True)
        return self.problem
