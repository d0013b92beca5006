"""A run on several machines whose folders of checkpoints are not one is refused, and says which machine is alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kenotron.config.errors import InputError
from kenotron.launch import shared_folder
from support.ranks import run_ranks


def check(rank: int, folders: list[Path]) -> str:
    shared_folder.SEEN_WITHIN_S = 0.5
    shared_folder.socket.gethostname = lambda: f"machine{rank}"  # type: ignore[attr-defined]
    try:
        shared_folder.check_shared(folders[rank])
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.budget(10, reason="two ranks")
def test_folders_that_are_not_shared_are_refused_on_every_rank(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert run_ranks(2, check, [one, one]) == ["", ""]
    assert list(one.iterdir()) == []
    first, second = run_ranks(2, check, [one, other])
    for found, folder in ((first, one), (second, other)):
        assert f"{folder} is not the same folder on all machines: machine1 does not see" in found
    assert list(one.iterdir()) == []
