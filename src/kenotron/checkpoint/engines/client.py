"""The training process's side of the writer process.

    writer = WriterProcess()
    writer.send("save", number, …)
    writer.wait(lambda: writer.state != WRITING)

The process is started once and inherits nothing: no torch, no open file of the training process. It ends when its
connection closes, so also when the training process is killed.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from threading import Lock
from typing import Any

from kenotron.checkpoint.engines.ring import Ring
from kenotron.config.dotted import search_path

WRITING = "writing"
WRITTEN = "written"  # this rank's files are complete and synced
COMMITTED = "committed"  # on a folder's first rank: the checkpoint is complete
FAILED = "failed"
LOOK_SECONDS = 0.1
BLOCK_BYTES = 4 << 20


class WriterProcess:
    """The started process. `freed`: bytes of the stream that are written; `state`: the state of the last save."""

    def __init__(self) -> None:
        self.memory = Ring.create()
        self.connection, child_end = multiprocessing.Pipe()
        code = "from kenotron.checkpoint.engines.writer import main; main()"
        arguments = [str(child_end.fileno()), str(self.memory), str(os.getpid())]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # readers of the training process's output need not wait for this one
            pass_fds=(child_end.fileno(), self.memory),
            env={**os.environ, "PYTHONPATH": search_path()},
            start_new_session=True,  # Ctrl-C on the terminal stops only the training process
        )
        child_end.close()
        self._sending, self._receiving = Lock(), Lock()
        self._begin(0)
        self.state = COMMITTED  # no save yet

    def _begin(self, number: int) -> None:
        self.number, self.state, self.freed = number, WRITING, 0
        self.problem: str | None = None
        self.committed: tuple[int, float, tuple[str, ...]] = (0, 0.0, ())

    def resize(self, capacity: int) -> Ring:
        """Return the ring with a new capacity, which the process gets as well. Nothing may be in flight."""
        os.ftruncate(self.memory, capacity)
        self.send("ring", capacity)
        return Ring(self.memory, capacity)

    def begin(self, job: dict[str, Any]) -> None:
        """Start the next save."""
        self._begin(self.number + 1)
        self.send("save", job)

    def send(self, kind: str, content: object) -> None:
        """Send one message; if the process has ended, the save fails."""
        try:
            with self._sending:
                self.connection.send((kind, self.number, content))
        except OSError:
            self._ended()

    def receive(self, seconds: float = 0.0) -> None:
        """Handle the pending messages, after waiting up to `seconds` for the first."""
        with self._receiving:
            try:
                while self.alive and self.connection.poll(seconds):
                    seconds = 0.0
                    self._take(*self.connection.recv())
            except (OSError, EOFError):
                self._ended()

    def wait(self, until: Callable[[], bool]) -> None:
        """Handle messages until `until()` is true, which the state FAILED of an ended process must make it."""
        while not until():
            self.receive(LOOK_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the process was running at its last message."""
        return not self.connection.closed

    def close(self) -> None:
        """End the process and wait for its end; a save in flight is aborted."""
        self.connection.close()
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:  # it hangs in a call of the file system, or gets no CPU time
            self.process.kill()
            self.process.wait()
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1

    def _take(self, kind: str, number: int, content: Any) -> None:
        if number != self.number:
            return  # a message of an aborted save
        if kind == "freed":
            self.freed = content
        elif kind == FAILED:
            self.state, self.problem = FAILED, content
        else:
            self.state = kind
            if kind == COMMITTED:
                self.committed = content

    def _ended(self) -> None:
        self.connection.close()
        code = self.process.wait()
        if self.state != COMMITTED:
            self.state = FAILED
            self.problem = self.problem or f"the process that writes checkpoints ended with exit code {code}"


class GivenUp(Exception):
    """The save has failed or is aborted by the training process: no further byte is needed."""


class SaveStream:
    """One save's `total` bytes on their way through the ring."""

    def __init__(self, writer: WriterProcess, ring: Ring, total: int) -> None:
        self.writer, self.ring, self.total = writer, ring, total
        self.step = max(BLOCK_BYTES, ring.capacity // 64)  # bytes per message; too many messages would block
        self.there = self.sent = 0
        self.stopped = False

    def fits(self, end: int) -> bool:
        """Return whether the bytes up to `end` fit into the ring now. Raises GivenUp."""
        if self.stopped or self.writer.state == FAILED:
            raise GivenUp
        return end - self.writer.freed <= self.ring.capacity

    def wait(self, end: int) -> None:
        """Wait until the bytes up to `end` fit. All copies so far must have been reported. Raises GivenUp."""
        self._send(self.there)
        self.writer.wait(lambda: self.fits(end))

    def copied(self, end: int) -> None:
        """Report that the bytes up to `end` are in the ring."""
        self.there = end
        if end - self.sent >= self.step or end == self.total:
            self._send(end)

    def _send(self, end: int) -> None:
        if end > self.sent:
            self.writer.send("staged", end)
            self.sent = end
