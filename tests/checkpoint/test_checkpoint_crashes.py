"""A save may be killed, or fail, at any moment: a step's folder is complete at every moment.

The moments are not sampled but counted: every call of the operating system that changes the disk is one, and
the process dies, or the call fails, at each of them in turn.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kenotron.checkpoint.durable import locked
from kenotron.checkpoint.engine import Keep
from kenotron.checkpoint.folders import list_checkpoints, newest_complete, resolve
from kenotron.checkpoint.leftovers import tidy
from kenotron.checkpoint.retention import prune
from kenotron.config.errors import CheckpointError
from support.checkpoint_states import load_and_compare, save_step

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")


def count_calls(monkeypatch: pytest.MonkeyPatch, at: Callable[[int, str], None]) -> None:
    """Have `at(number, name)` called before every call that changes the disk."""
    number = 0

    def wrapped(name: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            nonlocal number
            number += 1
            at(number - 1, name)
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrapped(name, getattr(os, name)))


def calls_of(work: Callable[[], object]) -> list[str]:
    names: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        count_calls(monkeypatch, lambda number, name: names.append(name))
        work()
    return names


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that dies, without any cleaning up, before its call `number`. Did it die?"""
    child = os.fork()
    if child == 0:
        with pytest.MonkeyPatch.context() as monkeypatch:
            count_calls(monkeypatch, lambda now, name: os._exit(9) if now == number else None)
            try:
                work()
            finally:
                os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where that is possible: a death of the process, unlike one of the machine, needs no disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as path:
        yield Path(path)


def error_at(number: int, code: int, work: Callable[[], object]) -> tuple[CheckpointError | None, list[str]]:
    """The error that `work` ends with if its call `number` fails; the name of that call."""
    failed: list[str] = []

    def fail(now: int, name: str) -> None:
        if now == number:
            failed.append(name)
            raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as monkeypatch:
        count_calls(monkeypatch, fail)
        try:
            work()
        except CheckpointError as error:
            return error, failed
    return None, failed


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("step", [pytest.param(20, marks=pytest.mark.slow), 10])  # a new one, the same again
def test_a_process_killed_at_any_call_leaves_the_old_state_or_the_new_one(folder: Path, step: int) -> None:
    save_step(folder / "pattern", 10, seed=1)

    def work(root: Path) -> None:
        save_step(root, step, seed=2)

    def killed(number: int, call: str) -> int:
        """The state that is left, 1 or 2, after a kill at that call."""
        root = folder / f"killed-{number}"
        shutil.copytree(folder / "pattern", root)
        assert killed_at(number, lambda: work(root)), f"call {number} was never reached"
        tidy(root)
        newest = newest_complete(root)
        assert newest is not None, f"nothing is left after a kill at call {number}, {call}"
        state = load_and_compare(newest)
        assert resolve(root) == newest or state == 2
        assert set(entries(root)) <= {"10", "20", "latest.txt"}
        if number % 8 == 0:  # and the next run's save works there
            work(root)
            assert load_and_compare(root / str(step)) == 2
        shutil.rmtree(root)
        return state

    shutil.copytree(folder / "pattern", folder / "dry")
    calls = calls_of(lambda: work(folder / "dry"))
    assert len(calls) > 40
    states = [killed(number, call) for number, call in enumerate(calls)]
    assert states == sorted(states), "an earlier kill left a later state"
    assert set(states) == {1, 2}


def test_a_prune_killed_at_any_call_leaves_every_other_checkpoint_intact(folder: Path) -> None:
    for step in (10, 20, 30):
        save_step(folder / "pattern", step)

    shutil.copytree(folder / "pattern", folder / "dry")
    calls = calls_of(lambda: prune(folder / "dry", Keep(1)))
    assert len(calls) > 20
    for number in range(len(calls)):
        root = folder / f"killed-{number}"
        shutil.copytree(folder / "pattern", root)
        assert killed_at(number, partial(prune, root, Keep(1)))
        lines: list[str] = []
        assert newest_complete(root, lines.append) == root / "30"
        assert [entry.problem for entry in list_checkpoints(root) if entry.problem] == lines == []
        prune(root, Keep(1))
        tidy(root)
        assert entries(root) == ["30", "latest.txt"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_save_that_fails_at_any_call_says_so_in_one_line_and_leaves_nothing(folder: Path, code: int) -> None:
    root = folder / "root"
    save_step(root, 10, seed=1)

    def fails(number: int) -> str | None:
        """The name of call `number` if its failing was passed over."""
        error, failed = error_at(number, code, lambda: save_step(root, 20, seed=2))
        if error is not None:
            assert os.strerror(code) in str(error)
            assert str(root) in str(error)
            assert "\n" not in str(error)
        left = entries(root)
        assert set(left) <= {"10", "20", "latest.txt"}, left
        assert load_and_compare(newest_complete(root)) == (2 if "20" in left else 1)
        assert load_and_compare(root / "10") == 1
        shutil.rmtree(root / "20", ignore_errors=True)
        (root / "latest.txt").write_text("10")
        return failed[0] if error is None else None

    total = len(calls_of(lambda: save_step(root, 20, seed=2)))
    shutil.rmtree(root / "20")
    passed_over = [fails(number) for number in range(0, total, 1 if code == errno.ENOSPC else 7)]
    # Only removing what is not there any more may fail without a word.
    assert {name for name in passed_over if name} <= {"unlink"}


def test_a_step_that_is_saved_again_is_never_lost_to_an_error(folder: Path) -> None:
    root = folder / "root"
    total = len(calls_of(lambda: save_step(root, 10, seed=1)))
    for number in range(total + 20):  # the second time there is more to do: the first one steps aside
        save_step(root, 10, seed=1)
        error, _ = error_at(number, errno.EIO, lambda: save_step(root, 10, seed=2))
        assert load_and_compare(newest_complete(root)) in ((1, 2) if error else (2,))
        assert not [name for name in entries(root) if "tmp" in name or "replaced" in name]
        tidy(root)
        assert entries(root) == ["10", "latest.txt"]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere, so it becomes somebody who may not."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    save_step(tmp_path / "warm", 1)  # whatever is imported late is imported
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        save_step(root, 10)
        os.chmod(folder, 0o755)
        os.chmod(root, 0o555)
        with as_nobody():
            with pytest.raises(CheckpointError, match=rf"cannot create {root}/.*: Permission denied"):
                save_step(root, 20)
            with pytest.raises(CheckpointError, match=r"cannot create .*/other: Permission denied"):
                save_step(Path(folder) / "other", 20)
            with pytest.raises(CheckpointError, match=rf"cannot create {root}/.*: Permission denied"):
                tidy(root)
            assert newest_complete(root) == root / "10"
        os.chmod(root, 0o755)


def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut forgets what was not synced, so at the rename every file and folder must have been."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record(source: Path, target: Path) -> None:
        events.append(("rename", str(target)))
        if Path(target).name == "10":
            present = {str(path) for path in [Path(source), *Path(source).rglob("*")]}
            assert present <= {path for kind, path in events if kind == "sync"}
            manifest = events.index(("sync", f"{source}/manifest.json"))
            later = {path for kind, path in events[manifest + 1 :] if kind == "sync"}
            assert later == {str(source)}, "something but the folder's own name was synced after the manifest"
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record)
    save_step(tmp_path / "root", 10)
    kinds = [(kind, Path(path).name) for kind, path in events]
    published = kinds.index(("rename", "10"))
    assert kinds[published + 1] == ("sync", "root")
    assert kinds[published + 3 :] == [("rename", "latest.txt"), ("sync", "root")]
    assert ("sync", tmp_path.name) in kinds[:published], "the name of the new root was not synced"


def test_leftovers_of_the_dead_are_cleared_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    save_step(tmp_path, 10)
    for name in ("20.tmp-00000000", ".trash-5-00000000", "mine.tmp-1"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "rank0.safetensors").write_bytes(b"x")
    (tmp_path / "latest.txt.tmp-00000000").write_text("2")
    lines: list[str] = []
    with locked(tmp_path):  # somebody is saving
        tidy(tmp_path, lines.append)
        assert len(entries(tmp_path)) == 6
        assert lines == [f"another process is saving into {tmp_path}; its files are left alone"]
    tidy(tmp_path, lines.append)
    assert entries(tmp_path) == ["10", "latest.txt", "mine.tmp-1"]
    assert "removed 20.tmp-00000000" in lines[1]


def test_two_processes_do_not_save_into_one_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "__defaults__", (0.2,))
    save_step(tmp_path, 10)
    with locked(tmp_path), pytest.raises(CheckpointError, match=f"another process is saving into {tmp_path}"):
        save_step(tmp_path, 20)
    save_step(tmp_path, 20)
    assert newest_complete(tmp_path) == tmp_path / "20"
