"""A run on several machines whose folders of checkpoints are not one is refused, and says which machine is alone."""

import time
from pathlib import Path
from threading import Thread

import pytest

from kenotron.config.errors import InputError
from kenotron.launch import shared_folder
from support.ranks import run_ranks
from support.tiny_run import tiny_config


def check(rank: int, folders: list[Path], is_shared: str = "false", late: float | None = None) -> str:
    """What a rank is refused with. Files of rank 0 appear in rank 1's folder `late` seconds late."""

    def copy() -> None:
        time.sleep(late or 0.0)
        for path in folders[0].iterdir():
            (folders[1] / path.name).touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_folder, "SEEN_WITHIN_S", 0.5)
        patch.setattr(shared_folder.socket, "gethostname", lambda: f"machine{rank}")
        if late is not None and rank == 1:
            Thread(target=copy).start()
        try:
            made = tiny_config(folders[rank], f"checkpoints.checkpoints_path_is_shared_file_system={is_shared}")
            shared_folder.check_shared(folders[rank], made.checkpoints.checkpoints_path_is_shared_file_system)
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


@pytest.mark.budget(10, reason="two ranks")
def test_a_slow_file_system_is_waited_for_where_the_config_says_that_it_is_shared(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    assert run_ranks(2, check, folders, "true", 1.5) == ["", ""]
    assert all("machine1 does not see" in refused for refused in run_ranks(2, check, folders, "false", 1.5))
