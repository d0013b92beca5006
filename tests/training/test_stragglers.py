"""A rank that is slower than the others is named, and one that is slow once is not."""

from pathlib import Path

import pytest

from kenotron.observers.stragglers import RankPace, slow_ranks
from support.nursery import Nursery
from support.tiny_run import tiny_yaml

HOOKS = "general.hooks=[{path: kenotron.observers.stragglers.Stragglers, kwargs: {every: 3}}"


def paces(*seconds: float | None, waited: tuple[float, ...] = ()) -> list[RankPace]:
    return [RankPace(f"node{rank}", s, waited[rank] if waited else 0.0) for rank, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        (paces(1.0, 1.4, 1.2, 0.9), []),
        (paces(1.0, 2.1), [1]),  # of two, the faster one is the measure
        (paces(1.0, 1.0, 2.1, 1.6, 0.9), [2, 3]),
        (paces(1, 1, 1, waited=(0.09, 0.01, 0.02)), []),
        (paces(1, 1, 1, waited=(0.3, 0.01, 0.02)), [0]),
        (paces(1, 1, 1, waited=(0.3, 0.29, 0.31)), []),  # all wait for their batches: none waits for another rank
        (paces(1, 3, 1, waited=(0.3, 0.01, 0.02)), [0, 1]),
        (paces(None, None, waited=(0.3, 0.01)), [0]),  # they share cores
        (paces(None, 1.0, 1.2), []),
    ],
)
def test_which_ranks_are_slow(ranks: list[RankPace], found: list[int]) -> None:
    assert sorted(slow_ranks(ranks)) == found


@pytest.mark.slow
def test_a_rank_that_is_stopped_most_of_the_time_is_named(tmp_path: Path, nursery: Nursery) -> None:
    hooks = f"{HOOKS}, support.user_parts.OftenStopped]"
    keys = ("parallelism.dp=2", "tokens.train_steps=18", hooks)
    finished = nursery.run("train", tiny_yaml(tmp_path), *keys, folder=tmp_path)
    assert finished.code == 0, finished.stderr
    lines = [line for line in (finished.stdout + finished.stderr).splitlines() if "slow one" in line]
    assert lines, finished.stdout
    for line in lines:  # one, unless a neighbour on this machine slowed rank 0 for a moment
        assert "all ranks wait for a slow one: rank 1 on " in line
        assert " times as long as the others for the same products" in line
