"""Checkpoints in a store: never a half of one, whatever is killed between any two objects; found, fetched, removed."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kenotron.checkpoint.engine import Keep
from kenotron.checkpoint.manifest import read_manifest
from kenotron.checkpoint.remote import INCOMPLETE, Damaged, RemoteCheckpoints, find, local_copy
from kenotron.checkpoint.upload import Uploader
from kenotron.config import InputError
from kenotron.config.errors import CheckpointError
from kenotron.storage import fetching
from kenotron.storage.stores import Store
from support.checkpoint_states import flip_a_byte, load_and_compare, run_command, save_step

URL = "memory://robots/run"


@pytest.fixture(autouse=True)
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """fsspec's store in memory, empty: its objects by name."""
    monkeypatch.setattr(fetching, "FIRST_WAIT", 0.0)
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()


def upload(root: Path, **options: Any) -> Uploader:
    uploader = Uploader(root, URL, **options)
    uploader.upload_pending()
    return uploader


class Killed(BaseException):
    """In place of a SIGKILL: no call reaches the store any more."""


def count_changes(monkeypatch: pytest.MonkeyPatch, killed_at: int | None = None) -> list[str]:
    """Every object that is written or removed from now on, in order; the change `killed_at` and all later ones fail."""
    changes: list[str] = []
    dead: list[bool] = []

    def wrapped(name: str, original: Callable) -> Callable:
        def call(self: Store, at: str, *rest: Any) -> Any:
            if dead or len(changes) == killed_at:
                dead.append(True)
                raise Killed
            changes.append(f"{name} {at}")
            return original(self, at, *rest)

        return call

    for name in ("put", "upload", "delete"):
        monkeypatch.setattr(Store, name, wrapped(name, getattr(Store, name)))
    return changes


def upload_killed_at(number: int, root: Path, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        count_changes(monkeypatch, number)
        with pytest.raises(Killed):
            upload(root, **options)


def complete() -> dict[int, int]:
    """Step → seed of what the store shows as complete, every byte compared with its checksum."""
    remote, found = RemoteCheckpoints(URL), {}
    for entry in remote.all():
        assert entry.manifest is not None, entry.problem
        assert remote.verify(entry.step) == []
        found[entry.step] = entry.manifest.state["seed"]
    return found


def before_the_kill(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """20 and 30 on this machine; in the store 5, and another 20."""
    here, there = tmp_path / "here", tmp_path / "there"
    for step, seed in ((5, 5), (20, 99)):
        save_step(there, step, seed=seed)
    upload(there)
    for step in (20, 30):
        save_step(here, step)
    return here, dict(MemoryFileSystem.store)


def test_a_kill_between_any_two_objects_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, before = before_the_kill(tmp_path)
    with monkeypatch.context() as watched:
        changes = count_changes(watched)
        upload(here, keep=Keep(2))
    after = set(MemoryFileSystem.store)
    assert complete() == {20: 20, 30: 30}
    last = changes.index("put 30/manifest.json")
    assert changes[0] == f"put 30/{INCOMPLETE}"
    assert all(change.startswith("upload 30/") for change in changes[1:last])
    assert changes[last + 1 : last + 3] == [f"delete 30/{INCOMPLETE}", "put latest.txt"]
    removal = changes.index("delete 5/manifest.json")
    assert changes[removal - 1] == f"put 5/{INCOMPLETE}"
    for number in range(len(changes)):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(before)
        upload_killed_at(number, here, keep=Keep(2))
        found = complete()
        assert set(found.items()) <= {(5, 5), (20, 99), (20, 20), (30, 30)}, changes[number]
        assert found, changes[number]
        upload(here, keep=Keep(2))
        assert complete() == {20: 20, 30: 30}, changes[number]
        assert set(MemoryFileSystem.store) == after, changes[number]
        assert Store(URL).read("latest.txt") == b"30"


def test_files_that_were_sent_are_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 10)
    files = len(read_manifest(tmp_path / "10").files)
    upload_killed_at(files, tmp_path)  # after the marker, and all but the last file
    changes = count_changes(monkeypatch)
    upload(tmp_path)
    assert len([change for change in changes if change.startswith("upload ")]) == 1
    changes.clear()
    upload(tmp_path)  # another process; nothing is left to do
    assert changes == []


def test_an_object_that_a_killed_upload_left_damaged_is_sent_again(tmp_path: Path, bucket: dict[str, Any]) -> None:
    save_step(tmp_path, 10)
    upload_killed_at(len(read_manifest(tmp_path / "10").files), tmp_path)
    flip_a_byte(next(bucket[name] for name in bucket if name.endswith("model/rank0.safetensors")))
    upload(tmp_path)
    assert complete() == {10: 10}


def test_what_arrives_changed_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 10)
    sent: list[str] = []
    put = MemoryFileSystem.put_file

    def flip(self: Any, here: str, there: str, **options: Any) -> None:
        put(self, here, there, **options)
        sent.append(there)
        if there.endswith(".safetensors") and sent.count(there) == 1:
            file = self.store[self._strip_protocol(there)]
            file.seek(100)
            file.write(b"\xff\xfe")

    monkeypatch.setattr(MemoryFileSystem, "put_file", flip)
    uploader = upload(tmp_path)
    assert uploader.problems == {}
    assert {sent.count(name) for name in sent if name.endswith(".safetensors")} == {2}
    assert complete() == {10: 10}


def test_a_damaged_local_file_is_not_uploaded(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    file = flip_a_byte(next((tmp_path / "10" / "model").glob("*.safetensors")))
    said: list[str] = []
    uploader = upload(tmp_path, report=said.append)
    assert uploader.problems == {10: f"{file} is damaged: its checksum is not the one in the manifest"}
    assert len(said) == 1
    assert RemoteCheckpoints(URL).all() == []


def test_a_half_of_another_machine_is_removed_and_nothing_else(tmp_path: Path, bucket: dict[str, Any]) -> None:
    save_step(tmp_path / "other", 10)
    upload_killed_at(4, tmp_path / "other")
    Store(URL).put("40/checkpoint_metadata.json", b"{}")  # nanotron's
    save_step(tmp_path / "here", 20)
    said: list[str] = []
    upload(tmp_path / "here", report=said.append)
    assert complete() == {20: 20}
    assert {name.split("/")[3] for name in bucket} == {"20", "40", "latest.txt"}
    assert said[0] == f"removed {URL}/10, which was incomplete"


def test_a_checkpoint_that_retention_removed_here_meanwhile_is_no_error(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    uploader = Uploader(tmp_path, URL)
    pending = uploader.pending()
    shutil.rmtree(tmp_path / "10")
    uploader.pending = lambda last=True: pending  # type: ignore[method-assign]
    uploader.upload_pending()
    assert uploader.problems == {}


def test_a_checkpoint_that_goes_while_it_is_sent_leaves_no_half(tmp_path: Path, monkeypatch: Any, bucket: Any) -> None:
    save_step(tmp_path, 10)
    send = Store.upload

    def and_prune(self: Store, name: str, file: Path, *rest: Any) -> None:
        if name.endswith("model/index.json"):
            shutil.rmtree(tmp_path / "10")
        send(self, name, file, *rest)

    monkeypatch.setattr(Store, "upload", and_prune)
    assert upload(tmp_path, files_at_once=1).problems == {}
    assert bucket == {}


def test_who_cannot_wait_is_told_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(tmp_path, 10)
    held, send = threading.Event(), Store.upload

    def slowly(self: Store, *arguments: Any) -> None:
        held.wait(20)
        send(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "upload", slowly)
        uploader = Uploader(tmp_path, URL)
        uploader.start()
        assert uploader.finish(seconds=0.05) == {10: "its upload was stopped"}
        held.set()
        uploader._thread.join(20)
    assert RemoteCheckpoints(URL).all() == []
    again = Uploader(tmp_path, URL)
    again.start()
    assert again.finish() == {}
    assert complete() == {10: 10}


def test_local_copies_are_removed_but_for_the_newest_while_the_run_lasts(tmp_path: Path) -> None:
    for step in (10, 20):
        save_step(tmp_path, step)
    uploader = Uploader(tmp_path, URL, remove=True)
    uploader.upload_pending(last=False)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["20"]
    uploader.upload_pending()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert complete() == {10: 10, 20: 20}


def test_an_export_goes_with_its_checkpoint(tmp_path: Path, bucket: dict[str, Any]) -> None:
    save_step(tmp_path, 10)
    uploader = Uploader(tmp_path, URL, beside="hf")
    uploader.upload_pending(last=False)
    assert bucket == {}  # the export is being written
    (tmp_path / "10" / "hf").mkdir()
    (tmp_path / "10" / "hf" / "config.json").write_text("{}")
    uploader.upload_pending(last=False)
    assert Store(URL).read("10/hf/config.json") == b"{}"
    assert complete() == {10: 10}


def test_a_damaged_object_is_named(tmp_path: Path, bucket: dict[str, Any]) -> None:
    save_step(tmp_path, 10)
    upload(tmp_path)
    remote = RemoteCheckpoints(URL)
    assert load_and_compare(remote.fetch(10, tmp_path / "whole")) == 10
    name = next(name for name in bucket if name.endswith(".safetensors"))
    flip_a_byte(bucket[name])
    expected = rf"memory:/{name} is damaged: its checksum is \w+, and was \w+ when written"
    with pytest.raises(Damaged, match=expected):
        remote.fetch(10, tmp_path / "fetched")
    assert not (tmp_path / "fetched" / "10").exists()
    assert len(remote.verify(10)) == 1
    del bucket[name]
    (entry,) = remote.all()
    assert entry.problem == f"memory:/{name} is missing"
    with pytest.raises(CheckpointError, match=r"it has no complete checkpoint; .* is missing"):
        find(URL)


def test_an_argument_names_a_step_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"no checkpoint at {URL}: it has no complete checkpoint"):
        find(URL)
    for step in (10, 20):
        save_step(tmp_path, step)
    upload(tmp_path)
    assert find(URL)[1] == 20
    assert find(f"{URL}/10/")[1] == 10
    with pytest.raises(CheckpointError, match=rf"no checkpoint at {URL}/30: {URL} has 10, 20"):
        find(f"{URL}/30")
    with pytest.raises(InputError, match="no such protocol"):
        find("memroy://robots/run")
    for latest, step in ((b"10\n", 10), (b"30", 20)):  # step 30 is not there
        RemoteCheckpoints(URL).store.put("latest.txt", latest)
        assert find(URL)[1] == step
    copy = local_copy(URL)
    assert copy == tmp_path / "cache" / "checkpoints" / "memory" / "robots" / "run" / "20"
    assert not list((copy / "optimizer").glob("*.safetensors"))
    written = copy.stat().st_mtime_ns
    assert local_copy(f"{URL}/20").stat().st_mtime_ns == written  # not fetched again
    save_step(tmp_path, 20, seed=99)
    upload(tmp_path)
    assert read_manifest(local_copy(URL)).state["seed"] == 99


def test_commands_take_urls(tmp_path: Path, bucket: dict[str, Any]) -> None:
    for step in (10, 20, 30):
        save_step(tmp_path, step)
    lines = run_command("upload", tmp_path, URL)[1].splitlines()
    assert [line.split(":")[1] for line in lines[:3]] == [f"//robots/run/{step}" for step in (30, 20, 10)]
    assert run_command("upload", tmp_path, URL) == (0, f"{URL} has every complete checkpoint of {tmp_path}\n")
    lines = run_command("list", URL)[1].splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30"]
    assert f"checkpoint 20 in {tmp_path}/cache/checkpoints/memory/robots/run/20" in run_command("show", f"{URL}/20")[1]
    assert run_command("show", URL)[1].startswith("checkpoint 30 in ")
    assert run_command("verify", URL) == (0, "".join(f"{URL}/{step} is intact\n" for step in (10, 20, 30)))
    name = next(name for name in bucket if "/20/optimizer" in name and name.endswith(".safetensors"))
    flip_a_byte(bucket[name])
    code, text = run_command("verify", f"{URL}/20")
    assert (code, text.split(":")[0]) == (1, "memory")
    assert "is damaged: its checksum is" in text
    assert run_command("prune", URL, "--keep-last", 1, "--dry-run")[1].splitlines()[0] == f"would remove {URL}/10"
    assert run_command("prune", URL, "--keep-last", 1)[1].splitlines()[:2] == [f"removed {URL}/10", f"removed {URL}/20"]
    assert {name.split("/")[3] for name in bucket} == {"30", "latest.txt"}
    for url in ("memory://robots/empty", "hf://robots/run"):
        with pytest.raises(CheckpointError, match=url):
            run_command("show", url)
    with pytest.raises(CheckpointError, match="memory://robots/empty holds no checkpoints"):
        run_command("list", "memory://robots/empty")
