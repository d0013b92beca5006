"""The process whose forks tests use as ranks, runs and servers."""

import gc
import sys

from support.preload import PRELOAD
from support.ranks import run_ranks


def imports(rank: int) -> tuple[bool, bool]:
    """Of a rank: whether it begins with all modules, and whether they are left alone by garbage collections."""
    return set(PRELOAD) <= sys.modules.keys(), gc.get_freeze_count() > 10_000


def test_ranks_begin_with_what_they_would_import() -> None:
    assert run_ranks(1, imports) == [(True, True)]
