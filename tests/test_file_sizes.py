"""No file grows beyond what can be read in one go."""

from __future__ import annotations

import pytest

from support.tiny_run import REPOSITORY

LINES = 600


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_no_file_is_longer_than_six_hundred_lines(folder: str) -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (REPOSITORY / folder).rglob("*.py")}
    assert lengths
    assert {str(path): length for path, length in lengths.items() if length > LINES} == {}
