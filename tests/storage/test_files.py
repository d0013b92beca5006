"""Files that survive a power failure: what a rename makes visible was synced before it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kenotron.storage.files import publish_folder, replace_file


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


def test_a_file_is_synced_then_renamed_and_then_its_folder_is_synced(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    replace_file(tmp_path / "latest.txt", b"10")
    (first, temporary), renamed, last = events
    assert first == "sync"
    assert renamed == ("rename", f"{temporary} {tmp_path / 'latest.txt'}")
    assert last == ("sync", str(tmp_path))


def test_a_folder_is_published_with_all_of_its_files_and_names_synced(
    tmp_path: Path, events: list[tuple[str, str]]
) -> None:
    temporary, final = tmp_path / "1.tmp-0", tmp_path / "1"
    (temporary / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (temporary / name).write_bytes(b"x")
    publish_folder(temporary, final)
    at = events.index(("rename", f"{temporary} {final}"))
    synced = {path for _, path in events[:at]}
    assert synced == {str(temporary / name) for name in ("", "a", "inner", "inner/b")}
    assert events[at + 1 :] == [("sync", str(tmp_path))]
