"""`launch.hangs`: time is counted by a clock that nobody sets, and the rank that hangs is the one that is named."""

import contextlib
import io
import json
import re
import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from kenotron.launch import hangs
from kenotron.launch.hangs import PendingCall, RankStatus, find_hang, verdict
from kenotron.parallel import ranks
from support.ranks import run_ranks

GROUP = ("default_pg", "default")


def call(number: int, made_ns: int, waits: bool = True) -> dict[str, object]:
    """A collective as torch's flight recorder has it."""
    names = {"process_group": GROUP, "collective_seq_id": number, "profiling_name": "gloo:all_reduce"}
    return names | {"time_created_ns": made_ns, "waits": waits}


class Clocks:
    """Seconds since the machine's start, and what its clock says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, self.calls = 0.0, []
        self.made_ns = time.time_ns()
        monkeypatch.setattr(hangs.time, "monotonic", lambda: self.passed)
        monkeypatch.setattr(hangs.time, "time", lambda: self.made_ns / 1e9)
        monkeypatch.setattr(hangs.time, "time_ns", lambda: self.made_ns)
        monkeypatch.setattr(hangs, "_collectives", lambda: self.calls)


@pytest.mark.parametrize("jump_s", [-86_400, 0, 86_400])
def test_a_clock_that_is_set_makes_no_hang_and_hides_none(jump_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    clocks.calls = [call(7, clocks.made_ns)]  # of an earlier run: it never ends
    timer = hangs.CollectiveTimer(10.0)
    clocks.made_ns += jump_s * 10**9
    clocks.calls = [*clocks.calls, call(8, clocks.made_ns - jump_s * 10**9 + 1)]
    while (found := timer.timed_out()) is None:
        clocks.passed += 0.5
        assert clocks.passed < 15
    assert (found.operation, found.group, found.number) == ("all_reduce", "default_pg", 8)
    assert 10 < clocks.passed <= 12


def test_collectives_that_end_are_no_hang_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    timer = hangs.CollectiveTimer(10.0)
    for number in range(100):
        clocks.passed += 1
        clocks.calls = [call(number, number, waits=False), call(number + 1, number + 1)]
        assert timer.timed_out() is None


CALL = PendingCall("all_reduce", "data.py:221 in finish", "0", 7)
WAITS = RankStatus("data.py:221 in finish", True, {"0": (7, "all_reduce")}, ("0", 7, "all_reduce"))
ELSEWHERE = RankStatus("clip.py:83 in _global_norm", True, {"0": (6, "all_reduce")}, ("1", 9, "all_reduce"))
HANGS = RankStatus("hook.py:5 in after_step", False, {"0": (6, "all_reduce")})
READS = RankStatus("run.py:90 in fit", False, {"0": (6, "all_reduce")}, reading="source.py:4 in read")
HANGS_AFTER_IT = RankStatus("hook.py:5 in after_step", False, {"0": (7, "all_reduce")}, ("0", 7, "all_reduce"))


@pytest.mark.parametrize(
    ("statuses", "missing", "blame"),
    [
        ([WAITS, HANGS], [1], "rank 1 did not join it"),
        ([WAITS, None, HANGS], [1, 2], "ranks 1, 2 did not join it"),  # rank 1 did not reply
        ([WAITS, HANGS_AFTER_IT], [1], "all others wait for rank 1"),  # it has started the sum of a gradient
        ([HANGS_AFTER_IT, WAITS], [0], "all others wait for rank 0"),  # the rank that reports is the one that hangs
        ([WAITS, ELSEWHERE, HANGS_AFTER_IT], [2], "all others wait for rank 2"),  # rank 1 waits for it, too
        ([WAITS, ELSEWHERE, HANGS], [2], "rank 2 did not join it"),
        ([WAITS, ELSEWHERE], [1], "rank 1 did not join it"),
        ([WAITS, WAITS], [], "all are in a collective, but not in the same one"),
        ([WAITS, READS], [1], "rank 1 did not join it, a data stall: it waits for its batches"),
        ([WAITS, READS, READS], [1, 2], "ranks 1, 2 did not join it, a data stall: they wait for their batches"),
        ([WAITS, READS, HANGS], [1, 2], "ranks 1, 2 did not join it"),
    ],
)
def test_the_rank_that_hangs_is_the_one_for_which_the_others_wait(
    statuses: list[RankStatus | None], missing: list[int], blame: str
) -> None:
    assert verdict(CALL, 0, range(len(statuses)), statuses) == (missing, blame)


def test_a_rank_outside_of_the_group_is_missing_only_if_it_hangs() -> None:
    assert verdict(CALL, 0, [0, 1], [WAITS, ELSEWHERE, HANGS]) == ([2], "all others wait for rank 2")
    assert verdict(CALL, 0, [0, 1], [WAITS, ELSEWHERE, ELSEWHERE]) == ([1], "rank 1 did not join it")


def test_a_call_without_a_number_waits_for_those_that_do_not_communicate() -> None:
    send = PendingCall("send", "pipeline.py:9 in run")
    assert verdict(send, 0, range(3), [WAITS, ELSEWHERE, HANGS_AFTER_IT]) == ([2], "rank 2 did not join it")


def test_ranks_tell_their_status_through_the_store() -> None:
    store = torch.distributed.HashStore()
    for rank, status in enumerate([WAITS, HANGS]):
        store.set(f"status/{rank}", json.dumps(asdict(status)))
    hang = find_hang(store, 0, 2, CALL, 5.0)
    assert hang.missing == [1]
    assert hang.report.splitlines() == [
        "rank 0 has waited more than 5 s (parallelism.timeout_seconds) in all_reduce (number 7) of all ranks: "
        "rank 1 did not join it",
        "  rank 0: at data.py:221 in finish",
        "  rank 1: at hook.py:5 in after_step; the last that it joined was all_reduce (number 6)",
    ]


def test_a_thousand_ranks_at_one_place_are_one_line_of_the_report() -> None:
    store = torch.distributed.HashStore()
    for rank in range(1024):
        store.set(f"status/{rank}", json.dumps(asdict(HANGS if rank in (7, 8, 100) else WAITS)))
    hang = find_hang(store, 0, 1024, CALL, 5.0)
    assert hang.missing == [7, 8, 100]
    lines = hang.report.splitlines()
    assert lines[0].endswith("of all ranks: ranks 7, 8, 100 did not join it")
    named = [line.split(":")[0].strip() for line in lines[1:]]
    assert named == ["rank 0", "ranks 1-6, 9-99, 101-1023", "ranks 7, 8, 100"]


def test_nccl_and_gloo_number_the_collectives_of_one_group_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not joined gloo's number 7 may have joined thousands of NCCL's, which come last in the record."""
    joined = [(5, "gloo:all_reduce"), (6, "gloo:all_reduce"), (3000, "nccl:_all_gather_base")]
    entries = [call(number, number, waits=False) | {"profiling_name": name} for number, name in joined]
    monkeypatch.setattr(hangs, "_collectives", lambda: entries)
    late = hangs._status()
    assert late.last == {"default_pg": (6, "all_reduce"), "default_pg on nccl": (3000, "_all_gather_base")}
    waits = PendingCall("all_reduce", "collectives.py:231 in sum_over_ranks", "default_pg", 7)
    assert verdict(waits, 0, [0, 1], [WAITS, late]) == ([1], "rank 1 did not join it")


@pytest.mark.parametrize("with_sends", [False, True])
def test_a_collective_beside_sends_waits_whatever_ended_last(monkeypatch: pytest.MonkeyPatch, with_sends: bool) -> None:
    """NCCL numbers sends and receives by themselves, and its last completed number may be one of theirs."""

    def entry(number: int, **more: object) -> dict[str, object]:
        names = {"pg_id": 3, "process_group": ["pp", ""], "profiling_name": "nccl:all_reduce"}
        given = {"collective_seq_id": number, "time_created_ns": number, "retired": False, "is_p2p": False}
        return names | given | more

    recorded = [entry(6, retired=True), entry(7), *[entry(90, is_p2p=True, retired=True)] * with_sends]
    dump = {"pg_status": {"3": {"last_completed_collective": 90}}, "entries": recorded}
    monkeypatch.setattr(hangs, "flight_recorder_dumps", lambda: [dump])
    assert [each["waits"] for each in hangs._collectives()] == [False, with_sends]


def late(rank: int, missing: int) -> str:
    """What this rank writes while it waits for rank `missing` of three, which comes half a second later."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "SAY_EVERY_S", 0.2)
        dist.barrier()
        if rank == missing:
            time.sleep(0.5)
        ranks.wait_for_all()
    return said.getvalue()


@pytest.mark.parametrize("missing", [2, 0])
def test_a_rank_that_is_waited_for_while_data_are_prepared_is_named(missing: int) -> None:
    """By rank 0 alone, whose output is the console; if it is the one, by another."""
    found = run_ranks(3, late, missing)
    speaker = 0 if missing else next(rank for rank in (1, 2) if found[rank])
    for rank, text in enumerate(found):
        lines = rf"(rank {rank} has waited \d s for rank {missing} to be ready: without a limit, .*\n)+"
        assert re.fullmatch(lines if rank == speaker else "", text), (rank, text)
