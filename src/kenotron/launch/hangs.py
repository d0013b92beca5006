"""Find a collective that not all ranks join, the ranks that have not joined it, and the place of each rank.

Torch's flight recorder numbers the collectives of every group on every rank. A rank that has waited longer than the
timeout asks the others for their status through the store of the run; their threads reply even if their programs hang:

    rank 0   gather number 57 of all ranks, waiting for 3 s         at collectives.py:231 in sum_over_ranks
    rank 1   broadcast number 56 of all ranks, done                 at user_parts.py:31 in after_step
                                                                     ─▶ rank 1 has not joined number 57

A rank whose program waits for its batches does not hang: the report calls it a data stall, and says where the loader's
thread is reading.

The recorder does not count sends and receives between pipeline stages. They reach torch's own timeout a little later;
with gloo the same report is made then, and the missing ranks are those that are not communicating.
"""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from kenotron.observers.data_stall import place_of, place_of_reading
from kenotron.parallel.ranks import ranks_in_words
from kenotron.parallel.shared_memory import IN_MEMORY, last_calls
from kenotron.parallel.torch_internals import flight_recorder_dumps, process_groups

ON_NCCL = " on nccl"
STATUS_WITHIN_S = 4.0
TIMEOUT_WORDS = ("Timed out", "timed out", "Timeout(ms)", "timeout")
# The fields of a collective that are read here, in version 2.10 of the flight recorder.
FIELDS = {"pg_id", "process_group", "collective_seq_id", "profiling_name", "time_created_ns", "retired", "is_p2p"}

Identity = tuple[str, int, int]  # of a collective: group, number, time of its creation


@dataclass(frozen=True)
class PendingCall:
    """A call of torch.distributed that does not end; `group` and `number` are None for a send or receive."""

    operation: str
    place: str
    group: str | None = None
    number: int | None = None


@dataclass(frozen=True)
class RankStatus:
    """The place of a rank's program, and the last collective of every group that it joined.

    `reading` is the place where the batches are read that the rank waits for, or None if it does not wait for batches.
    """

    place: str
    communicating: bool  # inside a call of torch.distributed
    last: dict[str, tuple[int, str]] = field(default_factory=dict)  # group → number, operation
    waiting: tuple[str, int, str] | None = None  # group, number, operation
    reading: str | None = None


@dataclass(frozen=True)
class Hang:
    """The ranks for which the others wait, and a report for users.

    `missing` is empty if all ranks are in a collective, but not in the same one. It may include a rank that has joined:
    one that starts a sum of gradients, and hangs before it waits for the sum.
    """

    missing: list[int]
    report: str


class CollectiveTimer:
    """Finds the collective of this rank that takes longer than a timeout, by ten checks in that time.

    Earlier collectives are of another run in this process, and may never have ended, so they are ignored. Time counts
    from the first check that sees a collective wait, because torch's timestamps are from a clock that may be changed.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.next_look = time.monotonic() + timeout_seconds / 10
        self.earlier = {_identity(entry) for entry in _collectives()}
        self.seen_at: dict[Identity, float] = {}  # waiting collective → time of the first check that saw it

    def timed_out(self) -> PendingCall | None:
        """Return the first collective that has waited longer than the timeout, or None."""
        now = time.monotonic()
        if now < self.next_look:
            return None
        self.next_look = now + self.timeout_seconds / 10
        calls = {_identity(entry): entry for entry in _collectives() if entry["waits"]}
        self.seen_at = {call: self.seen_at.get(call, now) for call in calls if call not in self.earlier}
        for call, since in self.seen_at.items():
            if now - since > self.timeout_seconds:
                entry, (place, _) = calls[call], place_of()
                return PendingCall(_operation(entry), place, _group(entry), entry["collective_seq_id"])
        return None


def is_timeout(error: BaseException | None) -> bool:
    """Return whether torch gave up waiting for another rank."""
    while error is not None:
        is_distributed = isinstance(error, dist.DistError) or "gloo" in str(error)
        if is_distributed and any(word in str(error) for word in TIMEOUT_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def call_that_raised(error: BaseException) -> PendingCall:
    """Return the call that gave up with `error`, from its traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if f"{Path('torch')}/" not in frame.filename]
    calls = [frame.name for frame in frames if frame.name in dir(dist)]
    place = "an unknown place"
    if outside:
        place = f"{Path(outside[-1].filename).name}:{outside[-1].lineno} in {outside[-1].name}"
    return PendingCall(calls[-1] if calls else "a send or receive", place)


# ---- status of all ranks -----------------------------------------------------------------------------------


def reply_with_status(store: dist.Store, rank: int) -> None:
    """Write this rank's status to the store, if a rank has asked for it."""
    if store.check(["status/asked"]) and not store.check([f"status/{rank}"]):
        store.set(f"status/{rank}", json.dumps(asdict(_status())))


def find_hang(
    store: dist.Store, rank: int, size: int, call: PendingCall, timeout_seconds: float, within: float = STATUS_WITHIN_S
) -> Hang:
    """Ask all ranks for their status; return those that did not join `call`, and a report with the place of each.

    The report names ranks that do not reply `within` seconds.
    """
    store.set("status/asked", str(rank))
    reply_with_status(store, rank)
    until = time.monotonic() + within
    keys = [f"status/{other}" for other in range(size)]
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.1)
    statuses = [RankStatus(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]

    members = _members(call.group) or list(range(size))
    missing, blame = verdict(call, rank, members, statuses)
    among = "" if call.number is None else f" (number {call.number}) of {ranks_in_words(members, size)}"
    limit = f"more than {timeout_seconds:g} s (parallelism.timeout_seconds)"
    lines = [f"rank {rank} has waited {limit} in {call.operation}{among}: {blame}", f"  rank {rank}: at {call.place}"]
    places: dict[str, list[int]] = {}  # grouped, because most of a thousand ranks are at one place
    for other, status in enumerate(statuses):
        if other != rank:
            places.setdefault(_describe(status), []).append(other)
    lines += [f"  {ranks_in_words(ranks)}: {place}" for place, ranks in places.items()]
    return Hang(missing, "\n".join(lines))


def verdict(
    call: PendingCall, rank: int, members: Sequence[int], statuses: Sequence[RankStatus | None]
) -> tuple[list[int], str]:
    """Return the ranks for which `rank` waits in `call` of the ranks `members`, and the reason in words.

    `statuses` has the status of every rank of the run, or None if it did not reply.
    """
    absent = [other for other in members if other != rank and not _has_joined(call, statuses[other])]
    idle = [other for other, status in enumerate(statuses) if status is None or not status.communicating]
    if idle and not set(idle) & set(absent):  # the absent ranks themselves wait for a rank of another group
        return idle, f"all others wait for {ranks_in_words(idle)}{_data_stall(idle, statuses)}"
    if absent:
        missing = [other for other in absent if other in idle] or absent
        return missing, f"{ranks_in_words(missing)} did not join it{_data_stall(missing, statuses)}"
    return [], "all are in a collective, but not in the same one"


def _data_stall(missing: Sequence[int], statuses: Sequence[RankStatus | None]) -> str:
    """Return an addition to the report if all of the ranks `missing` wait for their batches, else ""."""
    if any((status := statuses[other]) is None or status.reading is None for other in missing):
        return ""
    return f", a data stall: {'it waits for its' if len(missing) == 1 else 'they wait for their'} batches"


def _has_joined(call: PendingCall, status: RankStatus | None) -> bool:
    """Return whether a rank joined `call`, by its number, or if it has none, whether the rank is communicating."""
    if status is None or call.number is None or call.group is None:
        return status is not None and status.communicating
    number, _ = status.last.get(call.group, (0, ""))
    return number >= call.number


def _describe(status: RankStatus | None) -> str:
    if status is None:
        return "did not reply"
    if status.waiting is not None:
        group, number, operation = status.waiting
        members = _members(group)
        name = ranks_in_words(members) if members else f"group {group}"
        return f"waits in {operation} (number {number} of {name}), at {status.place}"
    place = f"at {status.place}" if status.reading is None else f"waits for its batches, reading at {status.reading}"
    if not status.last:
        return place
    number, operation = max(status.last.values())
    return f"{place}; the last that it joined was {operation} (number {number})"


def _members(group: str | None) -> list[int]:
    """Return the ranks of a group by its name from `_group`; none if this rank is not in it."""
    process_group = process_groups().get((group or "").removesuffix(IN_MEMORY).removesuffix(ON_NCCL))
    return [] if process_group is None else dist.get_process_group_ranks(process_group)


# ---- this rank ---------------------------------------------------------------------------------------------


def _status() -> RankStatus:
    last: dict[str, tuple[int, str]] = {}
    waiting = None
    for entry in _collectives():
        group = _group(entry)
        last[group] = (entry["collective_seq_id"], _operation(entry))
        if entry["waits"] and waiting is None:
            waiting = (group, *last[group])
    place, communicating = place_of()
    return RankStatus(place, communicating, last, waiting, place_of_reading())


def _collectives() -> list[dict[str, Any]]:
    """Return the collectives of this process that torch has recorded, oldest first.

    A collective `waits` if neither it nor a later one of its group has ended, because NCCL never ends the parts of a
    batch. Sends and receives are left out for the same reason, and because gloo does not record them.
    """
    entries: list[dict[str, Any]] = []
    for dump in flight_recorder_dumps():
        groups = dump.get("pg_status", {})
        recorded = [entry for entry in dump.get("entries", []) if entry.keys() >= FIELDS]
        with_sends = {entry["pg_id"] for entry in recorded if entry["is_p2p"]}  # the last completed may be a send
        for entry in recorded:
            if not entry["is_p2p"]:
                status = {} if entry["pg_id"] in with_sends else groups.get(str(entry["pg_id"]), {})
                ended = int(status.get("last_completed_collective", -1))
                entries.append(entry | {"waits": not entry["retired"] and entry["collective_seq_id"] > ended})
    return entries + last_calls()


def _identity(entry: dict[str, Any]) -> Identity:
    """Return a key that is unique among the collectives of this process."""
    return entry["process_group"][0], entry["collective_seq_id"], entry["time_created_ns"]


def _group(entry: dict[str, Any]) -> str:
    """Return torch's name of the group, with a suffix for NCCL, which numbers the collectives apart from gloo."""
    return entry["process_group"][0] + (ON_NCCL if entry["profiling_name"].startswith("nccl:") else "")


def _operation(entry: dict[str, Any]) -> str:
    """Return ``all_reduce`` for ``gloo:all_reduce``."""
    return entry["profiling_name"].split(":", 1)[-1]
