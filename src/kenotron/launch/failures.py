"""If one rank fails, end all ranks within seconds, and report only the first failure.

Ranks wait for each other in every step, so a rank that is gone leaves the others waiting, or with an error about a
closed connection, which is not the cause. Every rank therefore has a thread that polls the store of the process
group twice a second (less often with thousands of ranks, which share it):

    rank 1   raises ──▶ writes "failure" to the store, prints its error, exits
    rank 0   waits in all_reduce; its thread reads "failure" ──▶ ends the process if it has not exited after 2 seconds

    rank 1   is killed, and writes nothing
    rank 0   its thread sees that the process of rank 1 is gone, and writes "failure" for it

Only the first failure is reported: it is never overwritten, and a rank that reads one exits silently (`PeerFailed`).
If the process that holds the store (Kénotron's launcher, torchrun or rank 0) is gone, the thread ends its own process,
so no rank is left behind. If its machine or the network is down, calls to the store do not return for a quarter of an
hour; a second thread, which does not call the store, ends the process after the timeout.
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
RANKS_LOOKING_PER_S = 2048  # the store's load: ranks of a larger run poll it less often
LEAVE_WITHIN_S = 2.0
CAUSE_WITHIN_S = 5.0  # after an error about a connection, wait so long for the failure that explains it


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, with its error in a few lines."""

    rank: int
    message: str
    machine: str = field(default_factory=socket.gethostname)

    def as_seen_by_others(self) -> PeerFailed:
        """Return the exception that ends the other ranks."""
        return PeerFailed(f"rank {self.rank} on {self.machine}: {self.message}", self.machine)


@dataclass
class Watch:
    """Watches the other ranks during a run: ``with Watch(timeout_seconds): train(…)``.

    An exception that leaves the block is written to the store; `PeerFailed` is raised instead if another rank failed
    before. A collective that waits longer than `timeout_seconds` is a hang.

    If ranks are replaced (`recovery`), `report_hang` receives the ranks that hang and the report about them, and
    `release` makes this rank's collectives raise, so that it leaves them; `leave_within_s` is longer, and
    `look_every_s` shorter, because all ranks wait for the last one to notice.
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
        self.failure: Failure | None = None
        self.over = threading.Event()
        self.on_machine = f"on/{_machine()}"
        self.known = 0  # the number of ranks of this machine whose process id was read, in the order of their start
        self.neighbours: dict[int, int] = {}  # rank → process id of the living ranks of this machine
        self.answered = True  # whether the store has answered since the second thread's last check
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
        """Return the exception to raise instead of `error`, or None if `error` is the cause of the failure."""
        if hangs.is_timeout(error):
            return self._report_hang(hangs.call_that_raised(error))
        if comes_from_another_rank(error):
            self._wait_for_failure(CAUSE_WITHIN_S)
        if self._write(Failure(self.rank, describe(error))):  # also for a peer that wrote no failure
            return RunFailed(str(error)) if isinstance(error, PeerFailed) else None
        assert self.failure is not None
        return self.failure.as_seen_by_others()

    def _report_hang(self, call: hangs.PendingCall) -> Exception:
        within = hangs.STATUS_WITHIN_S + self.look_every_s
        if self.store.add("hang", 1) > 1:  # all ranks time out, but only one asks the others, to avoid N² calls
            self._wait_for_failure(2 * within)
        hang = None
        if self._read() is None:
            hang = hangs.find_hang(self.store, self.rank, self.size, call, self.timeout_seconds, within)
        if hang is not None and self._write(Failure(self.rank, hang.report)):
            if self.report_hang is None:
                return RunFailed(hang.report)
            self.report_hang(hang.missing or [self.rank], hang.report)
        assert self.failure is not None
        return self.failure.as_seen_by_others()

    def _write(self, failure: Failure) -> bool:
        """Write `failure` unless there is one already, and return whether it is the first."""
        content = json.dumps(asdict(failure)).encode()
        first = self.store.compare_set("failure", "", content.decode())
        self.failure = Failure(**json.loads(first))
        return first == content

    def _read(self) -> Failure | None:
        if self.failure is None and self.store.check(["failure"]):
            self.failure = Failure(**json.loads(self.store.get("failure")))
        return self.failure

    def _wait_for_failure(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._read() is None and time.monotonic() < until:
            hangs.reply_with_status(self.store, self.rank)
            time.sleep(max(LOOK_EVERY_S, self.look_every_s) / 5)

    def _keep_store(self) -> None:
        """Wait for the other ranks if this is rank 0 and holds the store itself (without torchrun and launcher)."""
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
            except dist.DistError:  # the process that held the store is gone
                return self._end()
            self.answered = True
        return None

    def _end_without_store(self) -> None:
        """End this process if the store has not answered for the timeout."""
        silent = 0.0  # a sum of waits, not a clock: time in which this process was stopped (SIGSTOP) does not count
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
        """Write a failure for a dead rank of this machine; checks of all ranks of the run would be N² calls."""
        started = self.store.add(self.on_machine, 0)
        while self.known < started and self.store.check([key := f"{self.on_machine}/{self.known + 1}"]):
            rank, process_id = map(int, self.store.get(key).split())
            self.neighbours[rank] = process_id
            self.known += 1
        for rank, process_id in list(self.neighbours.items()):
            if _alive(process_id):
                continue
            del self.neighbours[rank]
            if not self.store.check([f"done/{rank}"]) and self._read() is None:
                message = f"rank {rank} (process {process_id}) died without an error: killed, out of memory, or a crash"
                if self._write(Failure(rank, message)) and not started_by_kenotron():
                    print(f"error: {message}", file=sys.stderr, flush=True)

    def _end_hang(self, call: hangs.PendingCall) -> None:
        """Report a hang in place of the main thread, which may wait in a call that never returns."""
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
        """End this process, unless its main thread ends it first."""
        abandon()
        if self.release is not None:
            self.release()
        if not self.over.wait(self.leave_within_s):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(exit_code)


def _store(rank: int) -> dist.Store:
    """Return the process group's store with a prefix for this run, and with a connection for the watch alone."""
    store: Any = default_store()
    store = store.clone() if hasattr(store, "clone") else store  # a waiting call would block calls of other threads
    number = store.add(f"kenotron/runs/{rank}", 1)  # the number of the run in these processes, equal on all ranks
    return dist.PrefixStore(f"kenotron/{number}", store)


def _machine() -> str:
    """Return an id of the space of process ids: the host (names may be equal), and on Linux the container."""
    namespace, boot = Path("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id")
    parts = os.readlink(namespace) if namespace.exists() else "", boot.read_text().strip() if boot.exists() else ""
    return " ".join([socket.gethostname(), *parts])


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True
