"""One rank fails, all end within seconds, and the one that failed is the one that is told.

Ranks wait for each other in every step, so one that is gone leaves the others waiting, or with an error about a
closed connection, which is not the cause. Every rank therefore has a thread that looks at a notice board, the store
that the process group came up with, twice a second:

    rank 1   raises ──▶ writes "failure" on the board, shows its error, exits
    rank 0   waits in all_reduce; its thread reads "failure" ──▶ 2 seconds to leave by itself, then the process ends

    rank 1   is killed, and writes nothing
    rank 0   its thread sees that rank 1's process is gone, and writes "failure" for it

Only the first to write is told: the message on the board is never replaced, and a rank that finds one there leaves in
silence (`PeerFailed`). Whoever holds the board, our launcher or torchrun or rank 0, may be gone too: then the thread
ends its process as well, so no rank is left behind.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d

from kenotron.launch import hangs
from kenotron.launch.rank import in_a_line, record

LOOK_EVERY_S = 0.5
LEAVE_WITHIN_S = 2.0
CAUSE_WITHIN_S = 5.0  # how long an error about a connection waits for the failure that explains it
ENDED_BY_ANOTHER = 75  # exit code of a rank that ended because another did


class PeerFailed(Exception):
    """Another rank failed, and tells why: there is nothing to add."""


@dataclass(frozen=True)
class Failure:
    """What stands on the board: who failed, and how, in a line or a few."""

    rank: int
    message: str


class Watch:
    """The thread of this rank, for the time of a run: ``with Watch(timeout_seconds): train(…)``.

    Leaving by an exception writes it on the board; where another failure stands there, `PeerFailed` takes its place.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout_seconds = timeout_seconds
        self.board = _board(self.rank)
        self.found: Failure | None = None
        self.over = threading.Event()
        self.neighbours: dict[int, int] = {}  # rank → process id, on this machine
        self.strangers = set(range(self.size)) - {self.rank}  # not heard of yet
        self.thread = threading.Thread(target=self._look_until_over, name="kenotron-watch", daemon=True)

    def __enter__(self) -> Self:
        self.board.set(f"process/{self.rank}", f"{os.getpid()} {_machine()}")
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            peer = None if error is None else self._not_our_fault(error)
            if error is None:
                self.board.set(f"done/{self.rank}", "")
                self._hold_the_board()
        except dist.DistError:
            peer = PeerFailed("whoever started the ranks is gone") if error is not None else None
        self.over.set()
        self.thread.join()
        if peer is not None:
            raise peer from None

    # ---- this rank's error -----------------------------------------------------------------------------------

    def _not_our_fault(self, error: BaseException) -> BaseException | None:
        """What to raise in the place of `error`; None when `error` is what the run failed of."""
        if hangs.is_timeout(error):
            return self._report_hang(hangs.where_it_waited(error))
        if _is_connection(error):
            until = time.monotonic() + CAUSE_WITHIN_S
            while self._read() is None and time.monotonic() < until:
                time.sleep(LOOK_EVERY_S / 5)
        if self._write(Failure(self.rank, in_a_line(error))):
            return None
        assert self.found is not None
        return PeerFailed(f"rank {self.found.rank}: {self.found.message}")

    def _report_hang(self, waiting: hangs.Waiting) -> Exception:
        from kenotron.train import RunFailed

        message = hangs.explain(self.board, self.rank, self.size, waiting, self.timeout_seconds)
        if self._write(Failure(self.rank, message)):
            return RunFailed(message)
        assert self.found is not None
        return PeerFailed(f"rank {self.found.rank}: {self.found.message}")

    def _write(self, failure: Failure) -> bool:
        """Whether `failure` is the first on the board."""
        ours = json.dumps(asdict(failure)).encode()
        stands = self.board.compare_set("failure", "", ours.decode())
        self.found = Failure(**json.loads(stands))
        return stands == ours

    def _read(self) -> Failure | None:
        if self.found is None and self.board.check(["failure"]):
            self.found = Failure(**json.loads(self.board.get("failure")))
        return self.found

    def _hold_the_board(self) -> None:
        """Where rank 0 itself holds the board (no torchrun, no launcher), it stays until the others are done."""
        if self.rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        keys = [f"done/{rank}" for rank in range(self.size)]
        while not self.board.check(keys) and self._read() is None:
            time.sleep(LOOK_EVERY_S / 5)

    # ---- the thread ------------------------------------------------------------------------------------------

    def _look_until_over(self) -> None:
        patience = hangs.Patience(self.timeout_seconds)
        while not self.over.wait(LOOK_EVERY_S):
            try:
                if self._read() is not None:
                    return self._end()
                hangs.answer(self.board, self.rank)
                self._look_for_the_dead()
                waiting = patience.overstayed()
                if waiting is not None:
                    return self._end_hang(waiting)
            except dist.DistError:  # the board is gone, and with it whoever held it
                return self._end()
        return None

    def _look_for_the_dead(self) -> None:
        for rank in sorted(self.strangers):
            if self.board.check([f"process/{rank}"]):
                process, machine = self.board.get(f"process/{rank}").decode().split(" ", 1)
                self.strangers.discard(rank)
                if machine == _machine():
                    self.neighbours[rank] = int(process)
        for rank, process in list(self.neighbours.items()):
            if _alive(process):
                continue
            del self.neighbours[rank]
            if not self.board.check([f"done/{rank}"]) and self._read() is None:
                died = f"rank {rank} (process {process}) died without a word: killed, out of memory, or a crash"
                if self._write(Failure(rank, died)) and not _told_by_launcher():
                    print(f"error: {died}", file=sys.stderr, flush=True)

    def _end_hang(self, waiting: hangs.Waiting) -> None:
        """The main thread waits, perhaps in a call that never returns: this thread tells for it."""
        error = self._report_hang(waiting)
        if not isinstance(error, PeerFailed):
            if _told_by_launcher():
                record(error)
            else:
                print(f"error: {error}", file=sys.stderr, flush=True)
            self._end(exit_code=1)
        self._end()

    def _end(self, exit_code: int = ENDED_BY_ANOTHER) -> None:
        """End this process, unless its main thread does so first."""
        if not self.over.wait(LEAVE_WITHIN_S):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(exit_code)


def _board(rank: int) -> Any:
    """The process group's store, under names of this run's own, by a connection that nobody else uses."""
    store = distributed_c10d._get_default_store()
    store = store.clone() if hasattr(store, "clone") else store  # a call that waits would hold up the others
    number = store.add(f"kenotron/runs/{rank}", 1)  # the same on every rank, if another run went before
    return dist.PrefixStore(f"kenotron/{number}", store)


def _machine() -> str:
    """Where process ids mean the same: the host, and on Linux the container."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(namespace) if namespace.exists() else ''}"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, so alive
        return True
    return True


def _told_by_launcher() -> bool:
    """Whether `local.start_ranks` started this rank: then it tells what happened, from what we leave for it."""
    return "KENOTRON_LAUNCH" in os.environ


def _is_connection(error: BaseException) -> bool:
    """Whether this is what one sees of another rank's end: a connection of gloo, NCCL or the store that closed."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, dist.DistError) or "gloo" in str(found).lower() or "nccl" in str(found).lower():
            return True
        found = found.__cause__ or found.__context__
    return False
