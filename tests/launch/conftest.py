"""The tiny runs and the nursery of the train tests serve here too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

if TYPE_CHECKING:
    from nursery import Nursery


@pytest.fixture(scope="module")
def nursery(private_cache: Path) -> Iterator[Nursery]:
    from nursery import Nursery

    with Nursery(KENOTRON_CACHE=str(private_cache)) as made:
        yield made
