"""Layouts against one process: `like_one_process(2, problem, "tp=2")` trains both and compares them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.layout_runs import Problem, Seen, expect_the_same, train_alone, train_on_layout
from support.ranks import run_ranks


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Problem], Path]:
    """What one process makes of a problem (`train_alone`), each trained once."""
    made: dict[str, Path] = {}

    def get(problem: Problem) -> Path:
        if repr(problem) not in made:
            made[repr(problem)] = train_alone(problem, tmp_path_factory.mktemp("alone"))
        return made[repr(problem)]

    return get


@pytest.fixture
def like_one_process(reference_of: Callable[[Problem], Path], tmp_path: Path) -> Callable[..., list[Seen]]:
    """What each rank of a layout saw of a problem: the same as one process, within rounding."""

    def compare(
        world_size: int, problem: Problem, layout: str, rounding: float = 1e-6, work: Any = train_on_layout
    ) -> list[Seen]:
        reference = reference_of(problem)
        ranks = run_ranks(world_size, work, problem, layout, tmp_path, reference)
        expect_the_same(ranks, reference, rounding)
        return ranks

    return compare
