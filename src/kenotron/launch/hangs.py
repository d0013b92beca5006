"""A collective that not all ranks join: which one it is, who has not come, and where they are.

Torch's flight recorder numbers the collectives of every group on every rank. Rank 0 has waited too long and asks the
others, over the board that `failures` looks at; their threads answer even while their programs hang:

    rank 0   all_reduce number 57 of all ranks, waiting for 3 s         at run.py:92 in agree
    rank 1   all_reduce number 56 of all ranks, done                    at user_parts.py:31 in after_step
                                                                     ─▶ rank 1 has not joined number 57

What the recorder does not count (sends and receives, between pipeline stages) runs into torch's own timeout a little
later; with gloo it is told the same way: a rank that is not waiting for anybody is the one that is waited for.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

ANSWER_WITHIN_S = 4.0
TIMEOUT_WORDS = ("Timed out", "timed out", "Timeout(ms)", "timeout")
# What the flight recorder must tell of a collective, by its version 2.10.
RECORDED = {"pg_id", "process_group", "collective_seq_id", "profiling_name", "time_created_ns", "retired", "is_p2p"}


@dataclass(frozen=True)
class Waiting:
    """A call of torch.distributed that does not end: number `number` of a group, None where nobody counts."""

    operation: str
    place: str
    group: str | None = None
    number: int | None = None


@dataclass(frozen=True)
class Whereabouts:
    """A rank's answer: the last collective of every group that it joined, and its place in the program."""

    place: str
    communicating: bool  # inside a call of torch.distributed
    last: dict[str, tuple[int, str]] = field(default_factory=dict)  # group → number, operation
    waiting: tuple[str, int, str] | None = None  # group, number, operation


class Patience:
    """Looks at this rank's collectives now and then, and finds the one that takes too long."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self.next_look = time.monotonic() + self.interval

    @property
    def interval(self) -> float:
        return self.timeout_seconds / 10

    def overstayed(self) -> Waiting | None:
        if time.monotonic() < self.next_look:
            return None
        self.next_look = time.monotonic() + self.interval
        for entry in _recorded():
            age = time.time() - entry["time_created_ns"] / 1e9
            if entry["waits"] and age > self.timeout_seconds:
                place, _ = _place()
                return Waiting(_operation(entry), place, entry["process_group"][0], entry["collective_seq_id"])
        return None


def is_timeout(error: BaseException) -> bool:
    """Whether torch gave up waiting for another rank."""
    found: BaseException | None = error
    while found is not None:
        about_ranks = isinstance(found, dist.DistError) or "gloo" in str(found)
        if about_ranks and any(word in str(found) for word in TIMEOUT_WORDS):
            return True
        found = found.__cause__ or found.__context__
    return False


def where_it_waited(error: BaseException) -> Waiting:
    """The call that gave up with `error`, by its traceback."""
    while error.__cause__ is not None:
        error = error.__cause__
    calls = traceback.extract_tb(error.__traceback__)
    ours = [call for call in calls if f"{Path('torch')}/" not in call.filename]
    known = [call.name for call in calls if call.name in dir(dist)]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}" if ours else "an unknown place"
    return Waiting(known[-1] if known else "a send or receive", place)


# ---- questions and answers ---------------------------------------------------------------------------------


def answer(board: Any, rank: int) -> None:
    """Say where this rank is, if somebody has asked."""
    if board.check(["question"]) and not board.check([f"answer/{rank}"]):
        board.set(f"answer/{rank}", json.dumps(asdict(whereabouts())))


def whereabouts() -> Whereabouts:
    last: dict[str, tuple[int, str]] = {}
    waiting = None
    for entry in _recorded():
        group = entry["process_group"][0]
        last[group] = (entry["collective_seq_id"], _operation(entry))
        if entry["waits"] and waiting is None:
            waiting = (group, *last[group])
    place, communicating = _place()
    return Whereabouts(place, communicating, last, waiting)


def explain(board: Any, rank: int, size: int, waiting: Waiting, timeout_seconds: float) -> str:
    """Ask all ranks, and make a message of what they say: the first line tells all, then one line a rank."""
    board.set("question", str(rank))
    answer(board, rank)
    until = time.monotonic() + ANSWER_WITHIN_S
    keys = [f"answer/{other}" for other in range(size)]
    while not board.check(keys) and time.monotonic() < until:
        time.sleep(0.1)
    answers: dict[int, Whereabouts | None] = {}
    for other, key in enumerate(keys):
        answers[other] = Whereabouts(**json.loads(board.get(key))) if board.check([key]) else None

    members = _members(waiting.group) or list(range(size))
    missing = _missing(waiting, members, answers, rank)
    if waiting.number is None:
        title = waiting.operation
    else:
        among = "all ranks" if len(members) == size else f"ranks {_listed(members)}"
        title = f"{waiting.operation} (number {waiting.number}) of {among}"
    if missing:
        blame = f"{'rank' if len(missing) == 1 else 'ranks'} {_listed(missing)} did not join it"
    else:
        blame = "all are in a collective, but not in the same one"
    patience = f"more than {timeout_seconds:g} s (parallelism.timeout_seconds)"
    lines = [f"rank {rank} has waited {patience} in {title}: {blame}"]
    lines += [f"  rank {rank}: at {waiting.place}"]
    lines += [f"  rank {other}: {_told(found)}" for other, found in answers.items() if other != rank]
    return "\n".join(lines)


def _missing(waiting: Waiting, members: list[int], answers: dict[int, Whereabouts | None], asking: int) -> list[int]:
    """Who has not joined: by number where collectives are numbered, else whoever is not communicating at all."""
    others = [other for other in members if other != asking]
    if waiting.number is None or waiting.group is None:
        return [other for other in others if (found := answers[other]) is None or not found.communicating]

    def joined(found: Whereabouts | None) -> bool:
        return found is not None and found.last.get(waiting.group or "", (0, ""))[0] >= (waiting.number or 0)

    return [other for other in others if not joined(answers[other])]


def _told(found: Whereabouts | None) -> str:
    if found is None:
        return "gives no answer"
    if found.waiting is not None:
        group, number, operation = found.waiting
        return f"waits in {operation} (number {number} of {_name(group)}), at {found.place}"
    if not found.last:
        return f"at {found.place}"
    number, operation = max(found.last.values())
    return f"at {found.place}; the last that it joined was {operation} (number {number})"


# ---- torch's flight recorder -------------------------------------------------------------------------------


def _recorded() -> list[dict[str, Any]]:
    """Collectives of this process, oldest first, as far as torch keeps them; empty where it keeps none.

    One that `waits` has not ended, and none after it in its group has: NCCL leaves the parts of a batch open for ever.
    Sends and receives are left out for the same reason, and because gloo does not record them.
    """
    from torch._C import _distributed_c10d as c

    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's and NCCL's, as far as this torch has them
        dump = getattr(c, name, None)
        found = json.loads(dump(True, False) or "{}") if dump is not None else {}
        groups = found.get("pg_status", {})
        for entry in found.get("entries", []):
            if not entry.keys() >= RECORDED or entry["is_p2p"]:
                continue
            ended = int(groups.get(str(entry["pg_id"]), {}).get("last_completed_collective", -1))
            entries.append(entry | {"waits": not entry["retired"] and entry["collective_seq_id"] > ended})
    return entries


def _operation(entry: dict[str, Any]) -> str:
    """``gloo:all_reduce`` → all_reduce."""
    return entry["profiling_name"].split(":", 1)[-1]


def _members(group: str | None) -> list[int]:
    """The ranks of the group that torch calls `group`."""
    from torch.distributed import distributed_c10d

    names: dict[str, Any] = {name: found for found, name in distributed_c10d._world.pg_names.items()}
    return dist.get_process_group_ranks(names[group]) if group in names else []


def _name(group: str) -> str:
    members = _members(group)
    return f"ranks {_listed(members)}" if members else f"group {group}"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


# ---- where the program is ----------------------------------------------------------------------------------


def _place() -> tuple[str, bool]:
    """``file.py:31 in after_step`` of the main thread, and whether it is inside torch.distributed from there."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    communicating = False
    while frame is not None and _is_machinery(module := frame.f_globals.get("__name__", "")):
        communicating = communicating or module.startswith("torch.distributed")
        frame = frame.f_back
    if frame is None:
        return "an unknown place", communicating
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}", communicating


def _is_machinery(module: str) -> bool:
    """Whether a module is torch's or Python's own: what is looked for is who called it."""
    root = module.split(".")[0]
    return root == "torch" or (root in sys.stdlib_module_names and root != "__main__")
