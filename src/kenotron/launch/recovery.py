"""Replace ranks that die or hang: a spare process, which has imported everything, takes the rank's place.

    kenotron train my.yaml parallelism.dp=2 --spares 1

    process 0    rank 0 ────────── leaves the broken group ──▶ rank 0 ───▶
    process 1    rank 1 ── killed
    process 2    waits ──────────────────────────────────────▶ rank 1 ───▶
    process 3                      started ──────────────────▶ waits

A generation is one process group and the rank of each process in it. When a rank fails, the others leave the group
through the error of a closed connection, their processes stay, and in the next generation all ranks call their work
again: training resumes from its newest complete checkpoint, as after a restart, but without the seconds of a start.

Faults that a new process cannot fix end the run as without spares: wrong input, a RunFailed that a run raises, or three
faults without a new checkpoint between them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kenotron.config.errors import RunFailed
from kenotron.launch.environment import check_cores, check_devices
from kenotron.launch.functions import RankConfig, WhyKilled
from kenotron.launch.local import cause, fresh_log, rank_variables, show_cursor, signals_forwarded, write_work
from kenotron.launch.machine_memory import system_file

LOOK_EVERY_S = 0.05
LEAVE_WITHIN_S = 5.0  # a rank that takes longer to leave the group of a failed rank is replaced, too
STOPPED_FOR_S = 1.0  # a process that is stopped (SIGSTOP) for longer has failed, unless the whole job is stopped
DIES_WITHIN_S = 60.0  # a killed process that lives longer may wait for a dead file server
START_SPARES_EVERY_S = 5.0  # not at the start of a generation, whose ranks need the cores until they train
MOST_FAULTS_WITHOUT_PROGRESS = 3


def start_ranks_with_spares(
    config: RankConfig,
    work: Callable[..., object],
    logs: Path,
    spares: int,
    progress: Callable[[], object],
    why_killed: WhyKilled | None = None,
) -> None:
    """Start ranks as `local.start_ranks` does, with `spares` more processes, which replace ranks that fail.

    `work` is called again on all ranks after a fault, and resumes; `progress` returns equal values if nothing was saved
    between two faults. Raises the error from which the run cannot recover.
    """
    count = config.parallelism.world_size
    check_devices(count)
    check_cores(count + spares)
    with tempfile.TemporaryDirectory(prefix="kenotron-") as temporary:
        folder = Path(temporary)
        write_work(folder, config, work, {})
        for rank in range(1, count):
            fresh_log(logs, rank)
        with signals_forwarded(folder, count) as forwarded:
            ranks = ReplacedRanks(count, spares, folder, logs, forwarded, progress, why_killed)
            try:
                ranks.run()
            finally:
                ranks.end()


@dataclass
class ReplacedRanks:
    """The processes of all ranks, and spare ones."""

    count: int
    spares: int
    folder: Path
    logs: Path
    forwarded: Sequence[int]
    progress: Callable[[], object]
    why_killed: WhyKilled | None

    def __post_init__(self) -> None:
        from torch.distributed import TCPStore

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[subprocess.Popen[bytes]] = []  # number → process, for all that were started
        self.places: list[int] = []  # rank → number of its process, in this generation
        self.generation = -1
        self.started_at = 0.0  # time of the last call of _ensure_idle
        self.stopped_since: dict[int, float] = {}
        self.last_progress: object = None
        self.faults_since = 0

    def run(self) -> None:
        """Start the processes and replace those that fail, until all ranks are done."""
        self._ensure_idle(self.count + self.spares)
        self._begin_generation([None] * self.count)
        while any(self.processes[number].poll() != 0 for number in self.places):
            time.sleep(LOOK_EVERY_S)
            failed, why = self._failed()
            if failed:
                self._replace(failed, why)
            elif time.monotonic() - self.started_at > START_SPARES_EVERY_S:
                self._ensure_idle(self.spares)  # a spare got a place, or died

    def end(self) -> None:
        """Kill the remaining processes: the spares, or all of them after an error."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        until = time.monotonic() + LEAVE_WITHIN_S
        while any(process.poll() is None for process in self.processes) and time.monotonic() < until:
            time.sleep(LOOK_EVERY_S)

    # ---- processes and their places --------------------------------------------------------------------------

    def _ensure_idle(self, count: int) -> None:
        """Start processes until `count` processes without a place are alive."""
        while len(self._idle()) < count:
            arguments = [str(self.folder), str(self.logs), str(self.store.port), str(len(self.processes))]
            command = [sys.executable, "-P", "-m", "kenotron.launch.recovering_rank", *arguments]
            self.processes.append(subprocess.Popen(command, env=self._environment()))
        self.started_at = time.monotonic()

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **rank_variables(self.count, self.folder),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not outlive the others
        }

    def _idle(self) -> list[int]:
        """Return the numbers of living processes without a place, ready ones first."""
        alive = [number for number, process in enumerate(self.processes) if process.poll() is None]
        idle = [number for number in alive if number not in self.places]
        return sorted(idle, key=lambda number: not self.store.check([f"ready/{number}"]))

    def _begin_generation(self, places: Sequence[int | None]) -> None:
        """Begin a generation; `places` is rank → number of its process, or None for an idle process."""
        self.places = [number for number in places if number is not None]
        self._ensure_idle(len(places) - len(self.places))
        idle = iter(self._idle())
        self.places = [next(idle) if number is None else number for number in places]
        self.generation += 1
        self._records().mkdir()
        ranks = {number: rank for rank, number in enumerate(self.places)}
        self.store.set(f"generation/{self.generation}", json.dumps(ranks))

    def _records(self) -> Path:
        return self.folder / f"generation-{self.generation}"

    # ---- faults ----------------------------------------------------------------------------------------------

    def _failed(self) -> tuple[set[int], str]:
        """Return the ranks that have died, hang or are stopped, and the reason if they did not record it."""
        dead = {rank for rank, number in enumerate(self.places) if self.processes[number].poll()}
        if dead:
            return dead, ""
        if self.store.check([f"hang/{self.generation}"]):
            hang = json.loads(self.store.get(f"hang/{self.generation}"))
            return set(hang["ranks"]), hang["report"]
        stopped = {rank for rank, number in enumerate(self.places) if self._is_stopped(number)}
        return stopped, f"rank {min(stopped)} was stopped (SIGSTOP)" if stopped else ""

    def _is_stopped(self, number: int) -> bool:
        """Return whether a signal has stopped the process for `STOPPED_FOR_S`; False except on Linux."""
        status = system_file(f"/proc/{self.processes[number].pid}/stat")
        if status is None or status.rpartition(")")[2].split()[0] not in "Tt":
            self.stopped_since.pop(number, None)
            return False
        return time.monotonic() - self.stopped_since.setdefault(number, time.monotonic()) > STOPPED_FOR_S

    def _replace(self, failed: set[int], why: str) -> None:
        """Begin a generation with other processes in the places of `failed`. Raises errors that cannot be recovered."""
        for rank in failed:
            self.processes[self.places[rank]].kill()
        survivors, late = self._wait_until_left(why)
        error = self._cause(why, late)
        show_cursor()
        if self.forwarded or self._is_final():
            raise error
        if self._faults_without_progress() >= MOST_FAULTS_WITHOUT_PROGRESS:
            _warn(f"{MOST_FAULTS_WITHOUT_PROGRESS} faults with no new checkpoint between them: the run ends")
            raise error
        places = [number if number in survivors else None for number in self.places]
        replaced = [rank for rank, number in enumerate(places) if number is None]
        self._begin_generation(places)
        summary, *details = str(error).splitlines()
        by = ", ".join(f"rank {rank} is now process {self.processes[self.places[rank]].pid}" for rank in replaced)
        _warn("\n".join([f"{summary}; {by}, and all ranks resume from the newest checkpoint", *details]))

    def _wait_until_left(self, why: str) -> tuple[set[int], set[int]]:
        """Wait for the group's end; return the numbers of processes that left it, and of those killed for being late.

        The other processes have ended by themselves. Raises RunFailed, with `why`, if one cannot be killed.
        """
        until, late = time.monotonic() + LEAVE_WITHIN_S + 2 * LOOK_EVERY_S, set[int]()
        while True:
            alive = {number for number in self.places if self.processes[number].poll() is None}
            left = {number for number in alive if self.store.check([f"left/{self.generation}/{number}"])}
            if left == alive:
                return left, late
            if time.monotonic() > until:
                late |= alive - left
                for number in alive - left:
                    self.processes[number].kill()
                if time.monotonic() > until + DIES_WITHIN_S:
                    ids = ", ".join(str(self.processes[number].pid) for number in sorted(alive - left))
                    stuck = (
                        f"alive {DIES_WITHIN_S:g} s after SIGKILL, perhaps because a file server or device does not "
                        f"answer: process {ids}"
                    )
                    raise RunFailed("\n".join(filter(None, [stuck, why])))
            time.sleep(LOOK_EVERY_S)

    def _cause(self, why: str, late: set[int]) -> BaseException:
        if why:
            return RunFailed(why)
        codes = {rank: self.processes[number].poll() for rank, number in enumerate(self.places) if number not in late}
        failed = {rank: code for rank, code in codes.items() if code}
        return cause(failed, bool(self.forwarded), self.why_killed, self._records(), self.logs)

    def _is_final(self) -> bool:
        """Return whether a rank has ended with an error for users: wrong input, or RunFailed."""
        records = [json.loads(path.read_text())["message"] for path in self._records().glob("*.json")]
        return any(record["extraInfo"]["for_users"] for record in records)

    def _faults_without_progress(self) -> int:
        """Return the number of faults since the last new checkpoint, including this one."""
        now = self.progress()
        self.faults_since = self.faults_since + 1 if now == self.last_progress else 1
        self.last_progress = now
        return self.faults_since


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
