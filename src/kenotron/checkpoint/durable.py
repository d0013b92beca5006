"""Files that are really on the disk: hashed while they are written, synced, and put in place by one rename.

    with HashedFile(folder / "weights") as file:      # a new file, never an existing one
        file.write(b"...")
    file.record                                       # FileRecord(bytes=3, xxh3="...")
    replace_text(root / "latest.txt", "10")           # readers see the old text or the new, nothing else

A rename is atomic only towards other processes; towards a power cut it is so only when the file, and
then the folder that holds its name, were synced. Hence `sync_folder` after every change of names.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import xxhash

from kenotron.config.errors import InputError

# One write: large enough that system calls cost nothing, small enough that the bytes which were just hashed
# are still in the processor's cache when the kernel copies them.
BLOCK_BYTES = 1 << 20
LOCK_SECONDS = 60.0


class CheckpointError(InputError):
    """A checkpoint cannot be written, found, or trusted; the message is one line that names the file."""


class FolderBusy(CheckpointError):
    """Another process is saving into the folder, or another run is using it."""


class FileRecord(NamedTuple):
    """What the manifest knows of one file: its size in bytes and its 64-bit XXH3 in hexadecimal."""

    bytes: int
    xxh3: str


def refusal(doing: str, path: Path, error: OSError) -> CheckpointError:
    """The one line for an operating-system error: what was being done, to which file, and why it failed.

    >>> str(refusal("write", Path("/x"), OSError(errno.EACCES, "Permission denied")))
    'cannot write /x: Permission denied'
    """
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next((parent for parent in path.parents if parent.exists()), Path("/"))
        reason += f" ({shutil.disk_usage(folder).free / 1e6:.0f} MB free)"
    return CheckpointError(f"cannot {doing} {path}: {reason}")


class HashedFile:
    """A new file whose XXH3 is computed from the bytes on their way to the disk, so nothing is read back.

    Leaving the `with` block syncs the file and sets `record`. An error removes nothing: whoever owns the
    folder does that.
    """

    record: FileRecord

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = xxhash.xxh3_64()
        self._bytes = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise refusal("create", path, error) from error

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`: a short write (a signal, Linux's limit of 2 GiB) goes on where it stopped."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._hash.update(block)
            try:
                while block:
                    block = block[os.write(self._file, block) :]
            except OSError as error:
                raise refusal("write", self.path, error) from error
        self._bytes += len(view)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file)
                self.record = FileRecord(self._bytes, self._hash.hexdigest())
        except OSError as failure:
            raise refusal("sync", self.path, failure) from failure
        finally:
            os.close(self._file)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a new small file, synced."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


def hash_file(path: Path, sync: bool = False) -> FileRecord:
    """Read `path` once and return its size and XXH3; `sync` also makes sure that it is on the disk."""
    digest = xxhash.xxh3_64()
    size = 0
    buffer = memoryview(bytearray(4 * BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def make_folder(path: Path) -> None:
    """Create `path` and the folders above it, each one's name synced in the folder that holds it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise refusal("create", path, error) from error
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_text(path: Path, text: str) -> None:
    """Put `text` in `path`, atomically and durably."""
    temporary = temporary_beside(path)
    try:
        write_file(temporary, text.encode())
        os.rename(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise refusal("replace", path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def temporary_beside(path: Path) -> Path:
    """A name in the same folder that nobody else uses: `10` → `10.tmp-3f9c0a1b`."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def discard(path: Path) -> None:
    """Remove a checkpoint folder so that no crash leaves half of one behind under its own name."""
    trash = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return  # another process was faster
    except OSError as error:
        raise refusal("remove", path, error) from error
    sync_folder(path.parent)
    shutil.rmtree(trash, ignore_errors=True)


@contextmanager
def locked(root: Path, wait_seconds: float = LOCK_SECONDS) -> Iterator[bool]:
    """Hold the folder's lock: meanwhile every `*.tmp-*` in `root` but the holder's own is a dead process's.

    The kernel frees the lock when its process dies, by whatever death, so nothing has to be guessed from
    process ids or clocks. Yields False where the file system has no locks: then nobody's leftovers are
    touched. Raises FolderBusy after `wait_seconds`.
    """
    busy = f"another process is saving into {root}; give this run a folder of its own"
    with _flock(root / ".lock", wait_seconds, busy) as taken:
        yield taken


@contextmanager
def in_use(root: Path) -> Iterator[None]:
    """Mark `root` as one run's for as long as that run lives: two would write over each other's steps.

    As `locked`, it is freed by whatever death. Raises FolderBusy at once when another run has it.
    """
    busy = f"another run is using {root}; wait until it has ended, or give this run a folder of its own"
    with _flock(root / ".run", 0.0, busy):
        yield


@contextmanager
def _flock(path: Path, wait_seconds: float, busy: str) -> Iterator[bool]:
    """Hold the lock file `path`; False where the file system has no locks, FolderBusy saying `busy` if taken."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise refusal("create", path, error) from error
    try:
        yield _take(handle, path, wait_seconds, busy)
    finally:
        os.close(handle)


def _take(handle: int, path: Path, wait_seconds: float, busy: str) -> bool:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise FolderBusy(busy) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                return False
            raise refusal("lock", path, error) from error
