"""A collective that not all ranks join: which one it is, which ranks have not joined it, and where they are.

Torch's flight recorder numbers the collectives of every group on every rank. Rank 0 has waited longer than the timeout
and asks the others for their status through the store of the run; their threads reply even while their programs hang:

    rank 0   gather number 57 of all ranks, waiting for 3 s         at collectives.py:231 in sum_over_ranks
    rank 1   broadcast number 56 of all ranks, done                 at user_parts.py:31 in after_step
                                                                     ─▶ rank 1 has not joined number 57

A rank whose program waits for its batches has not hung: then the report calls it a data stall, and says where the
loader's thread is reading.

The recorder does not count sends and receives between pipeline stages. They run into torch's own timeout a little
later; with gloo the same report is made then, and the ranks that are not communicating are the ones waited for.
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
# Fields of a collective that are read here, as of the flight recorder's version 2.10.
FIELDS = {"pg_id", "process_group", "collective_seq_id", "profiling_name", "time_created_ns", "retired", "is_p2p"}

Identity = tuple[str, int, int]  # of a collective: group, number, when it was made


@dataclass(frozen=True)
class PendingCall:
    """A call of torch.distributed that does not end: number `number` of a group; None where it is not counted."""

    operation: str
    place: str
    group: str | None = None
    number: int | None = None


@dataclass(frozen=True)
class RankStatus:
    """Where a rank's program is, and the last collective of every group that it joined.

    `reading`: where it reads the batches that it waits for; None if it waits for none.
    """

    place: str
    communicating: bool  # inside a call of torch.distributed
    last: dict[str, tuple[int, str]] = field(default_factory=dict)  # group → number, operation
    waiting: tuple[str, int, str] | None = None  # group, number, operation
    reading: str | None = None


@dataclass(frozen=True)
class Hang:
    """The ranks for which the others wait (none: all are in a collective, but not in the same), and a report for users.

    A rank that has joined may be among them: a sum of gradients is started, and the rank hangs before it waits for it.
    """

    missing: list[int]
    report: str


class CollectiveTimer:
    """Finds the collective of this rank that takes longer than a timeout, looking ten times in that time.

    Collectives from before it was made are of an earlier run in this process, and may never have ended. Time counts
    from the look that first sees one wait: the clock by which torch dates it may be set meanwhile.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.next_look = time.monotonic() + timeout_seconds / 10
        self.earlier = {_identity(entry) for entry in _collectives()}
        self.seen_at: dict[Identity, float] = {}  # of those that wait

    def timed_out(self) -> PendingCall | None:
        """The first collective that has waited longer than the timeout."""
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
    """Whether torch gave up waiting for another rank."""
    while error is not None:
        about_ranks = isinstance(error, dist.DistError) or "gloo" in str(error)
        if about_ranks and any(word in str(error) for word in TIMEOUT_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def call_that_raised(error: BaseException) -> PendingCall:
    """The call that gave up with `error`, from its traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
    calls = traceback.extract_tb(error.__traceback__)
    ours = [call for call in calls if f"{Path('torch')}/" not in call.filename]
    known = [call.name for call in calls if call.name in dir(dist)]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}" if ours else "an unknown place"
    return PendingCall(known[-1] if known else "a send or receive", place)


# ---- status of all ranks -----------------------------------------------------------------------------------


def reply_with_status(store: dist.Store, rank: int) -> None:
    """Write this rank's status into the store, if a rank has asked for it."""
    if store.check(["status/asked"]) and not store.check([f"status/{rank}"]):
        store.set(f"status/{rank}", json.dumps(asdict(_status())))


def find_hang(
    store: dist.Store, rank: int, size: int, call: PendingCall, timeout_seconds: float, within: float = STATUS_WITHIN_S
) -> Hang:
    """Ask all ranks for their status: which did not join `call`, and a report with a summary and the place of each.

    Ranks that do not reply `within` seconds are reported so.
    """
    store.set("status/asked", str(rank))
    reply_with_status(store, rank)
    until = time.monotonic() + within
    keys = [f"status/{other}" for other in range(size)]
    while not store.check(keys) and time.monotonic() < until:
        time.sleep(0.1)
    found = [RankStatus(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]

    members = _members(call.group) or list(range(size))
    missing, blame = verdict(call, rank, members, found)
    among = "" if call.number is None else f" (number {call.number}) of {ranks_in_words(members, size)}"
    limit = f"more than {timeout_seconds:g} s (parallelism.timeout_seconds)"
    lines = [f"rank {rank} has waited {limit} in {call.operation}{among}: {blame}", f"  rank {rank}: at {call.place}"]
    places: dict[str, list[int]] = {}  # of a thousand ranks most are at the same one
    for other, status in enumerate(found):
        if other != rank:
            places.setdefault(_described(status), []).append(other)
    lines += [f"  {ranks_in_words(ranks)}: {place}" for place, ranks in places.items()]
    return Hang(missing, "\n".join(lines))


def verdict(
    call: PendingCall, rank: int, members: Sequence[int], found: Sequence[RankStatus | None]
) -> tuple[list[int], str]:
    """The ranks for which `rank` waits in `call` of the ranks `members`, and why they are the ones.

    `found` has the status of every rank of the run; None: it did not reply.
    """
    absent = [other for other in members if other != rank and not _has_joined(call, found[other])]
    idle = [other for other, status in enumerate(found) if status is None or not status.communicating]
    if idle and not set(idle) & set(absent):  # those that are absent wait for one of another group
        return idle, f"all others wait for {ranks_in_words(idle)}{_data_stall(idle, found)}"
    if absent:
        missing = [other for other in absent if other in idle] or absent
        return missing, f"{ranks_in_words(missing)} did not join it{_data_stall(missing, found)}"
    return [], "all are in a collective, but not in the same one"


def _data_stall(missing: Sequence[int], found: Sequence[RankStatus | None]) -> str:
    """What to add if all of the ranks `missing` wait for their batches."""
    if any((status := found[other]) is None or status.reading is None for other in missing):
        return ""
    return f", a data stall: {'it waits for its' if len(missing) == 1 else 'they wait for their'} batches"


def _has_joined(call: PendingCall, status: RankStatus | None) -> bool:
    """By number where collectives are numbered; else whether the rank is communicating at all."""
    if status is None or call.number is None or call.group is None:
        return status is not None and status.communicating
    number, _ = status.last.get(call.group, (0, ""))
    return number >= call.number


def _described(status: RankStatus | None) -> str:
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
    """The ranks of a group, by its name as of `_group`; empty if this rank is not in it."""
    found = process_groups().get((group or "").removesuffix(IN_MEMORY).removesuffix(ON_NCCL))
    return [] if found is None else dist.get_process_group_ranks(found)


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
    """Collectives of this process that torch has recorded, oldest first.

    One that `waits` has not ended, and none after it in its group has: NCCL leaves the parts of a batch open forever.
    Sends and receives are left out for the same reason, and because gloo does not record them.
    """
    entries: list[dict[str, Any]] = []
    for dump in flight_recorder_dumps():
        groups, found = dump.get("pg_status", {}), [each for each in dump.get("entries", []) if each.keys() >= FIELDS]
        with_sends = {each["pg_id"] for each in found if each["is_p2p"]}  # whose number the last completed may be
        for entry in found:
            if not entry["is_p2p"]:
                status = {} if entry["pg_id"] in with_sends else groups.get(str(entry["pg_id"]), {})
                ended = int(status.get("last_completed_collective", -1))
                entries.append(entry | {"waits": not entry["retired"] and entry["collective_seq_id"] > ended})
    return entries + last_calls()


def _identity(entry: dict[str, Any]) -> Identity:
    """What no other collective of this process has."""
    return entry["process_group"][0], entry["collective_seq_id"], entry["time_created_ns"]


def _group(entry: dict[str, Any]) -> str:
    """Torch's name of the group; with NCCL's own mark, as it numbers its collectives of a group apart from gloo's."""
    return entry["process_group"][0] + (ON_NCCL if entry["profiling_name"].startswith("nccl:") else "")


def _operation(entry: dict[str, Any]) -> str:
    """``gloo:all_reduce`` → all_reduce."""
    return entry["profiling_name"].split(":", 1)[-1]
