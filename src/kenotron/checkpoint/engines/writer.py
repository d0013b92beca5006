"""The process that writes one rank's files of a checkpoint; a folder's first rank's also commits it. No torch.

    every rank    ring ──▶ model/rank1.safetensors.tmp … ──▶ share-1.json: sizes and checksums, or the error
    first rank    all shares ──▶ index, config, manifest (last) ──▶ rename ──▶ latest.txt ──▶ prune

It uses no collectives: ranks meet in the checkpoint's temporary folder. The process runs at low priority, and ends when
the training process ends or is killed, leaving a temporary folder without a manifest.
"""

import contextlib
import json
import os
import shutil
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kenotron.checkpoint.durable import FileRecord, refusal
from kenotron.checkpoint.engine import find_writer
from kenotron.checkpoint.engines.client import COMMITTED, FAILED, WRITTEN, GivenUp
from kenotron.checkpoint.engines.ring import Ring
from kenotron.checkpoint.file_writer import FileWriter
from kenotron.checkpoint.folders import check_files
from kenotron.checkpoint.retention import prune_if_possible
from kenotron.checkpoint.saving import commit, in_order, write_small
from kenotron.config.errors import CheckpointError, InputError
from kenotron.storage.background import stay_in_background
from kenotron.storage.files import replace_file

LOOK_SECONDS = 0.02
PARENT_SECONDS = 1.0
CHUNK_BYTES = 4 << 20


def main() -> None:
    """Serve the training process that started this one; the arguments are connection, memory, and its process id."""
    stay_in_background()
    connection, memory, parent = map(int, sys.argv[1:])
    with contextlib.suppress(EOFError, ConnectionError):  # the training process has ended
        Server(Connection(connection), memory, parent).serve()


class Server:
    """The writer's side of the connection. `staged`: bytes of the stream that are in the ring."""

    def __init__(self, connection: Connection, memory: int, parent: int) -> None:
        self.connection, self.memory, self.parent = connection, memory, parent
        self.number = self.staged = 0
        self.files: list[tuple[str, bytes, int]] = []
        self.small: dict[str, bytes] = {}
        self.writer = "python"

    def serve(self) -> None:
        """Handle the messages of the training process until it ends."""
        while True:
            kind, number, content = self._receive()
            if kind == "ring":
                self.ring = Ring(self.memory, content)
            elif kind == "plan":
                self.files, self.small, self.writer = content
            elif kind == "save":
                self.number, self.staged = number, 0
                self._save(content)
            # "staged" and "give up" of a save that has already failed

    # ---- one save ----------------------------------------------------------------------------------------------

    def _save(self, job: dict[str, Any]) -> None:
        temporary, rank = job["temporary"], job["rank"]
        try:
            records = self._write_share(temporary, job["small"] | self.small)
            if job["verify"] and (problems := check_files(temporary, records)):
                raise CheckpointError("; ".join(problems))
            _leave(temporary, rank, {"files": records})
            self._send(WRITTEN, None)
            if rank == job["ranks"][0]:
                self._send(COMMITTED, self._commit(job))
        except (EOFError, ConnectionError):  # the training process has ended
            if not _share_path(temporary, rank).exists():
                leave_problem(temporary, rank, "its training process has ended")
            raise
        except (InputError, OSError, GivenUp) as error:
            problem = str(refusal("write", temporary, error)) if isinstance(error, OSError) else str(error)
            leave_problem(temporary, rank, problem)
            if rank == job["ranks"][0]:
                shutil.rmtree(temporary, ignore_errors=True)
            self._send(FAILED, problem)

    def _write_share(self, temporary: Path, small: dict[str, bytes]) -> dict[str, FileRecord]:
        records, position, open_file = dict[str, FileRecord](), 0, find_writer(self.writer)
        for name, header, size in self.files:
            with open_file(temporary / name, len(header) + size) as file:
                file.write(header)
                position = self._drain(file, position, position + size)
            records[name] = file.record
        return records | write_small(temporary, small)

    def _drain(self, file: FileWriter, position: int, end: int) -> int:
        """Write the stream from `position` to `end` as it arrives, and return the new position."""
        freed = position
        while position < end:
            self._look()
            while self.staged <= position:
                self._handle(*self._receive())
            begin, stop = self.ring.span(position, min(self.staged, end, position + CHUNK_BYTES) - position)
            file.write(memoryview(self.ring.memory)[begin:stop])
            position += stop - begin
            if position - freed >= self.ring.capacity // 16 or position == end:
                self._send("freed", position)
                freed = position
        return position

    def _commit(self, job: dict[str, Any]) -> tuple[int, float, tuple[str, ...]]:
        """Commit the checkpoint once the last rank's files are written, and return (bytes, time, notes)."""
        temporary, final = job["temporary"], job["final"]
        shares = [self._share(temporary, rank) for rank in job["ranks"]]
        for rank in job["ranks"]:
            _share_path(temporary, rank).unlink()
        size = commit(temporary, final, job["state"], in_order(shares))
        return size, time.monotonic(), prune_if_possible(final.parent, job["keep"])

    def _share(self, temporary: Path, rank: int) -> dict[str, FileRecord]:
        path = _share_path(temporary, rank)
        while not path.exists():
            self._look()
            time.sleep(LOOK_SECONDS)
        share = json.loads(path.read_bytes())
        if "problem" in share:
            raise CheckpointError(f"rank {rank}: {share['problem']}")
        return {name: FileRecord(*record) for name, record in share["files"].items()}

    # ---- messages ----------------------------------------------------------------------------------------------

    def _send(self, kind: str, content: object) -> None:
        self.connection.send((kind, self.number, content))

    def _receive(self) -> tuple[str, int, Any]:
        while not self.connection.poll(PARENT_SECONDS):
            if os.getppid() != self.parent:  # its fork may keep the connection open
                raise EOFError
        return self.connection.recv()

    def _look(self) -> None:
        """Handle the pending messages. Raises EOFError if the training process has ended."""
        if os.getppid() != self.parent:
            raise EOFError
        while self.connection.poll(0):
            self._handle(*self.connection.recv())

    def _handle(self, kind: str, number: int, content: Any) -> None:
        if number != self.number:
            return
        if kind == "staged":
            self.staged = content
        elif kind == "give up":
            raise GivenUp(content)


def leave_problem(temporary: Path, rank: int, problem: str) -> None:
    """Record in the folder why a rank's files will not arrive.

    If the folder is gone or the disk is full, the training processes tell one another.
    """
    with contextlib.suppress(OSError):
        _leave(temporary, rank, {"problem": problem})


def _leave(temporary: Path, rank: int, share: dict[str, Any]) -> None:
    replace_file(_share_path(temporary, rank), json.dumps(share).encode(), durable=False)


def _share_path(temporary: Path, rank: int) -> Path:
    return temporary / f"share-{rank}.json"
