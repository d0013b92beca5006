"""`checkpoints.writer`: the writer in C++ and the one in Python write the same bytes, and fail in the same words."""

import os
import resource
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kenotron.checkpoint.durable import FileRecord
from kenotron.checkpoint.engine import find_writer
from kenotron.checkpoint.folders import newest_complete, verify
from kenotron.config import InputError
from kenotron.config.errors import CheckpointError
from kenotron.storage.native import find_compiler
from support.pages import in_a_users_folder, read_page
from support.tiny_run import tiny_config, train_quietly

BLOCK = 4 << 20  # of native.cpp
NATIVE = pytest.param("native", marks=pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"))
both = pytest.mark.parametrize("name", ["python", NATIVE])


def data_of(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def write_in_parts(name: str, path: Path, data: bytes, part: int, expected: int) -> FileRecord:
    with find_writer(name)(path, expected) as file:
        for start in range(0, len(data), part):
            file.write(memoryview(data)[start : start + part])
        file.write(b"")
    return file.record


@both
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 12345])
def test_every_byte_is_written_and_hashed(name: str, size: int, tmp_path: Path) -> None:
    data = data_of(size)
    for number, (part, expected) in enumerate([(max(size, 1), size), (1_000_003, 0), (3 * BLOCK + 7, 2 * size + 5)]):
        path = tmp_path / str(number)
        assert write_in_parts(name, path, data, part, expected) == (size, xxhash.xxh3_64(data).hexdigest())
        assert path.read_bytes() == data


@both
def test_what_was_written_may_change_afterwards(name: str, tmp_path: Path) -> None:
    """The engines write from memory that is used again at once."""
    buffer = bytearray(BLOCK // 2)
    with find_writer(name)(tmp_path / "a", 0) as file:
        for number in range(40):
            buffer[:] = bytes([number]) * len(buffer)
            file.write(buffer)
    written = np.fromfile(tmp_path / "a", np.uint8).reshape(40, -1)
    assert (written == np.arange(40)[:, None]).all()


@both
def test_no_file_is_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(CheckpointError, match=r"^cannot create .*/a: File exists$"):
        find_writer(name)(tmp_path / "a", 10)
    assert (tmp_path / "a").read_bytes() == b"old"
    with pytest.raises(CheckpointError, match=r"^cannot create .*/missing/a: No such file or directory$"):
        find_writer(name)(tmp_path / "missing" / "a", 10)


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@both
@pytest.mark.parametrize("size", [20 * BLOCK, BLOCK + 1], ids=["early", "in the last byte, at close"])
def test_a_disk_that_takes_no_more_is_one_line_and_nothing_stays_open(name: str, size: int, tmp_path: Path) -> None:
    write_in_parts(name, tmp_path / "warm", b"x", 1, 1)  # whatever is made late is made
    data = data_of(size)
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), threads_and_files()
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"^cannot write {tmp_path}/a: File too large$"):
            write_in_parts(name, tmp_path / "a", data, BLOCK, len(data))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert threads_and_files() == before


@both
def test_an_error_of_the_caller_closes_the_file(name: str, tmp_path: Path) -> None:
    before = threads_and_files()
    with pytest.raises(ZeroDivisionError), find_writer(name)(tmp_path / "a", 0) as file:  # noqa: PT012
        file.write(data_of(3 * BLOCK + 1))
        raise ZeroDivisionError
    assert threads_and_files() == before
    assert not hasattr(file, "record")


@NATIVE.marks[0]
def test_threads_of_python_go_on_while_the_native_writer_writes(tmp_path: Path) -> None:
    """One call that waits for the disk holds no lock of Python's."""
    from kenotron.checkpoint.native import LIBRARY

    count, stopped = [0], threading.Event()

    def counting() -> None:
        while not stopped.is_set():
            count[0] += 1

    thread, data = threading.Thread(target=counting), data_of(8 * BLOCK)
    with find_writer("native")(tmp_path / "a", len(data)) as file:
        thread.start()
        try:
            before = count[0]
            LIBRARY.file_append(file._file, data, len(data))
            assert count[0] > before
        finally:
            stopped.set()
            thread.join()


def test_without_a_compiler_the_native_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delitem(sys.modules, "kenotron.checkpoint.native", raising=False)
    with pytest.raises(InputError, match=r"checkpoint/native\.cpp: no C\+\+ compiler"):
        train_quietly(tiny_config(tmp_path, "checkpoints.writer=native"))
    with pytest.raises(InputError, match=r"checkpoints\.writer: expected a dotted path .* did you mean 'native'"):
        find_writer("natve")
    with pytest.raises(InputError, match=r"checkpoints\.writer: expected a function of path and size, found 'os\.sep'"):
        find_writer("os.sep")


@pytest.mark.parametrize("engine", ["torch", pytest.param("async", marks=pytest.mark.slow)])
def test_the_writer_of_the_page_times_its_files(engine: str, tmp_path: Path) -> None:
    """The engines in the background import it in the process that writes."""
    page, root = read_page("native-extensions.md"), tmp_path / "checkpoints"
    with in_a_users_folder(page, tmp_path):
        engine_key = f"checkpoints.checkpointing_engine={engine}"
        train_quietly(tiny_config(tmp_path, engine_key, "checkpoints.writer=my_writer.TimedFile"))
    timed = sorted(str(path.parent.name) for path in root.rglob("rank0.safetensors.seconds"))
    assert timed == ["model", "optimizer"]
    assert verify(newest_complete(root)) == []


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, data = os.write, data_of(3_000_001)  # three blocks of `HashedFile`
    monkeypatch.setattr(os, "write", lambda file, block: write(file, block[: max(1, len(block) // 3)]))
    record = write_in_parts("python", tmp_path / "file", data, len(data), len(data))
    assert record == (len(data), xxhash.xxh3_64(data).hexdigest())
    assert (tmp_path / "file").read_bytes() == data
