"""One rank fails: all end within seconds, and only the failure that came first is reported.

Ranks wait for each other in every step, so one that is gone leaves the others waiting, or with an error about a
closed connection, which is not the cause. Every rank therefore has a thread that looks into the store that the
process group was started with, twice a second (with thousands of ranks less often: they share it):

    rank 1   raises ──▶ writes "failure" into the store, shows its error, exits
    rank 0   waits in all_reduce; its thread reads "failure" ──▶ 2 seconds to leave by itself, then the process ends

    rank 1   is killed, and writes nothing
    rank 0   its thread sees that rank 1's process is gone, and writes "failure" for it

Only the first failure is reported: it is never overwritten, and a rank that finds one exits silently (`PeerFailed`).
The process that holds the store (our launcher, torchrun or rank 0) may be gone too: then the thread ends its own
process as well, so no rank is left behind. If the machine that holds it is lost, or the network to it, calls to the
store do not return for a quarter of an hour; a second thread, which calls nobody, ends the process after the timeout.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from kenotron.config.errors import PeerFailed, RunFailed
from kenotron.launch import hangs
from kenotron.launch.environment import started_by_kenotron
from kenotron.launch.error_records import ENDED_BY_ANOTHER, record
from kenotron.observers.data_stall import place_of
from kenotron.parallel.ranks import comes_from_another_rank, describe
from kenotron.parallel.shared_memory import abandon
from kenotron.parallel.torch_internals import default_store

LOOK_EVERY_S = 0.5
RANKS_LOOKING_PER_S = 2048  # into the one store of a run: those of a larger one look less often
LEAVE_WITHIN_S = 2.0
CAUSE_WITHIN_S = 5.0  # how long an error about a connection waits for the failure that explains it


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and how, in one line or a few."""

    rank: int
    message: str
    machine: str = field(default_factory=socket.gethostname)

    def as_seen_by_others(self) -> PeerFailed:
        """What ends the other ranks."""
        return PeerFailed(f"rank {self.rank} on {self.machine}: {self.message}", self.machine)


@dataclass
class Watch:
    """Watches the other ranks during a run: ``with Watch(timeout_seconds): train(…)``.

    An exception that leaves the block is written into the store; `PeerFailed` is raised instead if another rank's
    failure exists already. `timeout_seconds` is how long a collective may wait before it counts as a hang.

    Where ranks are replaced (`recovery`), `report_hang` receives the ranks that hang and the report about them, and
    `release` makes this rank's collectives raise, so that it leaves them; `leave_within_s` is longer, and
    `look_every_s` shorter, as all ranks wait for the last one to notice.
    """

    timeout_seconds: float
    report_hang: Callable[[Sequence[int], str], None] | None = None
    release: Callable[[], None] | None = None
    leave_within_s: float = LEAVE_WITHIN_S
    look_every_s: float = LOOK_EVERY_S

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.look_every_s = max(self.look_every_s, self.size / RANKS_LOOKING_PER_S)
        self.store = _store(self.rank)
        self.found: Failure | None = None
        self.over = threading.Event()
        self.on_machine = f"on/{_machine()}"
        self.known = 0  # ranks of this machine whose process id is known, in the order in which they came
        self.neighbours: dict[int, int] = {}  # rank → process id, of those that are alive
        self.answered = True  # the store, since the second thread looked last
        names = {"kenotron-watch": self._look_until_over, "kenotron-store-watch": self._end_without_store}
        self.threads = [threading.Thread(target=look, name=name, daemon=True) for name, look in names.items()]

    def __enter__(self) -> Self:
        number = self.store.add(self.on_machine, 1)
        self.store.set(f"{self.on_machine}/{number}", f"{self.rank} {os.getpid()}")
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            peer = None if error is None else self._replacement(error)
            if error is None:
                self.store.set(f"done/{self.rank}", "")
                self._keep_store()
        except dist.DistError:
            peer = PeerFailed("the process that started the ranks is gone") if error is not None else None
        self.over.set()
        for thread in self.threads:
            thread.join()
        if peer is not None:
            raise peer from None

    # ---- this rank's error -----------------------------------------------------------------------------------

    def _replacement(self, error: BaseException) -> BaseException | None:
        """What to raise instead of `error`; None if `error` is the cause of the failure."""
        if hangs.is_timeout(error):
            return self._report_hang(hangs.call_that_raised(error))
        if comes_from_another_rank(error):
            self._wait_for_failure(CAUSE_WITHIN_S)
        if self._write(Failure(self.rank, describe(error))):  # a peer that has said nothing is reported here
            return RunFailed(str(error)) if isinstance(error, PeerFailed) else None
        assert self.found is not None
        return self.found.as_seen_by_others()

    def _report_hang(self, call: hangs.PendingCall) -> Exception:
        within = hangs.STATUS_WITHIN_S + self.look_every_s
        if self.store.add("hang", 1) > 1:  # all time out, and one asks all: N² calls would keep the store busy for long
            self._wait_for_failure(2 * within)
        hang = None
        if self._read() is None:
            hang = hangs.find_hang(self.store, self.rank, self.size, call, self.timeout_seconds, within)
        if hang is not None and self._write(Failure(self.rank, hang.report)):
            if self.report_hang is None:
                return RunFailed(hang.report)
            self.report_hang(hang.missing or [self.rank], hang.report)
        assert self.found is not None
        return self.found.as_seen_by_others()

    def _write(self, failure: Failure) -> bool:
        """Write `failure` unless another is there; returns whether it is the first."""
        ours = json.dumps(asdict(failure)).encode()
        first = self.store.compare_set("failure", "", ours.decode())
        self.found = Failure(**json.loads(first))
        return first == ours

    def _read(self) -> Failure | None:
        if self.found is None and self.store.check(["failure"]):
            self.found = Failure(**json.loads(self.store.get("failure")))
        return self.found

    def _wait_for_failure(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._read() is None and time.monotonic() < until:
            hangs.reply_with_status(self.store, self.rank)
            time.sleep(max(LOOK_EVERY_S, self.look_every_s) / 5)

    def _keep_store(self) -> None:
        """Where rank 0 itself holds the store (no torchrun, no launcher), it stays until the others are done."""
        if self.rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        keys = [f"done/{rank}" for rank in range(self.size)]
        while not self.store.check(keys) and self._read() is None:
            time.sleep(LOOK_EVERY_S / 5)

    # ---- the threads -----------------------------------------------------------------------------------------

    def _look_until_over(self) -> None:
        timer = hangs.CollectiveTimer(self.timeout_seconds)
        while not self.over.wait(self.look_every_s):
            try:
                if self._read() is not None:
                    return self._end()
                hangs.reply_with_status(self.store, self.rank)
                self._find_dead_ranks()
                call = timer.timed_out()
                if call is not None:
                    return self._end_hang(call)
            except dist.DistError:  # the store is gone, and so is the process that held it
                return self._end()
            self.answered = True
        return None

    def _end_without_store(self) -> None:
        """End this process when the store has not answered for the timeout."""
        silent = 0.0  # by counting: a process that was stopped (SIGSTOP) has not been without an answer
        while not self.over.wait(LOOK_EVERY_S):
            silent = 0.0 if self.answered else silent + LOOK_EVERY_S
            self.answered = False
            if silent > self.timeout_seconds + hangs.STATUS_WITHIN_S:
                host = os.environ.get("MASTER_ADDR", "the launcher")
                error = RunFailed(
                    f"rank {self.rank} has waited more than {self.timeout_seconds:g} s "
                    f"(parallelism.timeout_seconds) for {host}, through which ranks find each other: that machine "
                    f"is down, or the network to it; this rank is at {place_of()[0]}"
                )
                return self._end_with(error)
        return None

    def _find_dead_ranks(self) -> None:
        """Of this machine: to ask the store for every rank of the run would be N² calls of N ranks."""
        there = self.store.add(self.on_machine, 0)
        while self.known < there and self.store.check([key := f"{self.on_machine}/{self.known + 1}"]):
            rank, process_id = map(int, self.store.get(key).split())
            self.neighbours[rank] = process_id
            self.known += 1
        for rank, process_id in list(self.neighbours.items()):
            if _alive(process_id):
                continue
            del self.neighbours[rank]
            if not self.store.check([f"done/{rank}"]) and self._read() is None:
                died = f"rank {rank} (process {process_id}) died without an error: killed, out of memory, or a crash"
                if self._write(Failure(rank, died)) and not started_by_kenotron():
                    print(f"error: {died}", file=sys.stderr, flush=True)

    def _end_hang(self, call: hangs.PendingCall) -> None:
        """The main thread waits, perhaps in a call that never returns: this thread reports instead."""
        error = self._report_hang(call)
        if isinstance(error, PeerFailed):
            self._end()
        else:
            self._end_with(error)

    def _end_with(self, error: Exception) -> None:
        """Report `error`, and end this process."""
        if started_by_kenotron():
            record(error)
        else:
            print(f"error: {error}", file=sys.stderr, flush=True)
        self._end(exit_code=1)

    def _end(self, exit_code: int = ENDED_BY_ANOTHER) -> None:
        """End this process, unless its main thread does so first."""
        abandon()
        if self.release is not None:
            self.release()
        if not self.over.wait(self.leave_within_s):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(exit_code)


def _store(rank: int) -> dist.Store:
    """The process group's store, with keys of this run alone, through a connection of this thread alone."""
    store: Any = default_store()
    store = store.clone() if hasattr(store, "clone") else store  # a call that waits would hold up the others
    number = store.add(f"kenotron/runs/{rank}", 1)  # the same on every rank, if another run went before
    return dist.PrefixStore(f"kenotron/{number}", store)


def _machine() -> str:
    """Where process ids mean the same: the host (names may be equal), and on Linux the container."""
    namespace, boot = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")
    parts = os.readlink(namespace) if namespace.exists() else "", boot.read_text().strip() if boot.exists() else ""
    return " ".join([socket.gethostname(), *parts])


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, so alive
        return True
    return True
