"""How often ranks ask the one store of a run: a thousand share it, so N² calls would keep it busy for minutes."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from kenotron.config.errors import PeerFailed
from kenotron.launch import failures, hangs
from kenotron.launch.failures import Watch
from kenotron.launch.hangs import PendingCall

RANKS, ON_MACHINE = 256, 8
CALL = PendingCall("all_reduce", "data.py:221 in finish", "default_pg", 7)


class CountingStore:
    """A store that counts calls by the rank that makes them."""

    def __init__(self) -> None:
        self.store, self.rank, self.calls = dist.HashStore(), 0, Counter[int]()

    def __getattr__(self, name: str) -> object:
        self.calls[self.rank] += 1
        return getattr(self.store, name)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> CountingStore:
    counting = CountingStore()
    monkeypatch.setattr(failures, "_store", lambda rank: counting)
    monkeypatch.setattr(failures, "_machine", lambda: f"node{counting.rank // ON_MACHINE}")
    monkeypatch.setattr(failures.threading.Thread, "start", lambda thread: None)
    monkeypatch.setattr(dist, "get_rank", lambda: counting.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: RANKS)
    return counting


def watches(store: CountingStore) -> list[Watch]:
    found = []
    for rank in range(RANKS):
        store.rank = rank
        found.append(Watch(600.0).__enter__())
    return found


def test_a_rank_finds_those_of_its_machine_without_asking_for_all_others(store: CountingStore) -> None:
    for rank, watch in enumerate(watches(store)):
        store.rank = rank
        for _ in range(3):
            watch._find_dead_ranks()
        first = rank // ON_MACHINE * ON_MACHINE
        assert sorted(watch.neighbours) == list(range(first, first + ON_MACHINE))
    assert max(store.calls.values()) < 4 * ON_MACHINE


def test_thousands_of_ranks_look_less_often(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, seconds in ((8, 0.5), (1024, 0.5), (8192, 4.0)):
        monkeypatch.setattr(dist, "get_world_size", lambda ranks=ranks: ranks)
        assert Watch(600.0).look_every_s == seconds


def test_of_all_ranks_that_time_out_one_asks_the_others(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    report = hangs.Hang([3], "rank 3 did not join it")
    monkeypatch.setattr(hangs, "find_hang", lambda *arguments: asked.append(store.rank) or report)
    found = []
    for rank, watch in enumerate(watches(store)):
        store.rank = rank
        found.append(watch._report_hang(CALL))
    assert asked == [0]
    assert str(found[0]) == report.report
    assert {type(error) for error in found[1:]} == {PeerFailed}


def test_if_that_rank_is_gone_another_one_asks(store: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("hang", 1)
    monkeypatch.setattr(hangs, "STATUS_WITHIN_S", 0.0)
    monkeypatch.setattr(hangs, "find_hang", lambda *arguments: hangs.Hang([3], "rank 3 did not join it"))
    watch = Watch(600.0, look_every_s=0.0)
    assert str(watch._report_hang(CALL)) == "rank 3 did not join it"


def test_the_failure_that_came_first_is_the_cause_for_all(store: CountingStore, monkeypatch: Any) -> None:
    """Ranks 0 and 1 fail within the half second in which they would have read of rank 2's failure."""
    monkeypatch.setattr(failures.threading.Thread, "join", lambda thread: None)
    ranks = watches(store)[:3]
    cause = ValueError("the cause")
    ranks[2].__exit__(ValueError, cause, None)  # raises nothing else: it is reported as it is
    for other in ranks[:2]:
        with pytest.raises(PeerFailed, match=r"^rank 2 on \S+: .*the cause"):
            other.__exit__(OSError, OSError("a consequence"), None)
