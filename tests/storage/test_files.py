"""Files that survive a power failure: what a rename makes visible was synced before it. Locks, and files cut short."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from kenotron.storage.arrays import map_local_array
from kenotron.storage.files import locked, publish_folder, remove_folder, replace_file


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every sync and rename, in order, with the name of the file or folder at that moment."""
    seen: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        seen.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        seen.append(("rename", f"{source} {target}"))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    return seen


def test_a_file_is_synced_renamed_and_then_its_folder_synced(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    replace_file(tmp_path / "latest.txt", b"10")
    (first, temporary), renamed, last = events
    assert first == "sync"
    assert renamed == ("rename", f"{temporary} {tmp_path / 'latest.txt'}")
    assert last == ("sync", str(tmp_path))


def test_a_folder_is_published_with_all_of_it_synced(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    temporary, final = tmp_path / "1.tmp-0", tmp_path / "1"
    (temporary / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (temporary / name).write_bytes(b"x")
    publish_folder(temporary, final)
    at = events.index(("rename", f"{temporary} {final}"))
    synced = {path for _, path in events[:at]}
    assert synced == {str(temporary / name) for name in ("", "a", "inner", "inner/b")}
    assert events[at + 1 :] == [("sync", str(tmp_path))]


def test_a_folder_has_another_name_for_good_before_its_files_go(tmp_path: Path, events: list[tuple[str, str]]) -> None:
    (tmp_path / "1").mkdir()
    remove_folder(tmp_path / "1")
    (kind, names), last = events
    assert (kind, names.split()[0], last) == ("rename", str(tmp_path / "1"), ("sync", str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_who_finds_a_lock_held_waits_for_it(tmp_path: Path) -> None:
    order: list[object] = []
    waits = threading.Event()

    def second() -> None:
        with locked(tmp_path / "lock", on_wait=waits.set) as held:
            order.append(("second", held))

    thread = threading.Thread(target=second)
    with locked(tmp_path / "lock"):
        thread.start()
        assert waits.wait(30)
        order.append("first")
    thread.join(30)
    assert order == ["first", ("second", True)]


@pytest.mark.parametrize("count", [10, 10_000])
def test_an_array_whose_file_was_cut_short_is_an_error(count: int, tmp_path: Path) -> None:
    """Small arrays are read, large ones mapped."""
    expected = np.arange(count, dtype="<u2")
    expected.tofile(tmp_path / "ids")
    np.testing.assert_array_equal(map_local_array(tmp_path / "ids", np.dtype("<u2"), 0, count), expected)
    with pytest.raises(ValueError, match=r"ends before byte|mmap length is greater than file size"):
        map_local_array(tmp_path / "ids", np.dtype("<u2"), 2, count)
