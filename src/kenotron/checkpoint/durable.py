"""Write files durably: hash them while they are written, sync them, and publish them with one rename.

    with HashedFile(folder / "weights") as file:      # a new file, never an existing one
        file.write(b"...")
    file.record                                       # FileRecord(bytes=3, xxh3="...")
    replace_text(root / "latest.txt", "10")           # readers see the old text or the new one

`storage.files` has durable renames and locks; this file adds the hash and the messages of checkpoints.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import xxhash

from kenotron.config.errors import CheckpointError
from kenotron.storage import files

# Bytes of one write: large enough that system calls cost nothing, small enough that the bytes just hashed
# are still in the processor's cache when the kernel copies them.
BLOCK_BYTES = 1 << 20
LOCK_SECONDS = 60.0
# How long the lock of a killed run may outlive it: in a child that it was about to start, or on a file server.
RELEASE_SECONDS = 5.0
RUN = ".run"


class FolderBusy(CheckpointError):
    """Another process is saving into the folder, or another run is using it."""


class FileRecord(NamedTuple):
    """What the manifest records of one file: its size in bytes and its 64-bit XXH3 in hexadecimal."""

    bytes: int
    xxh3: str


def refusal(doing: str, path: Path, error: OSError) -> CheckpointError:
    """Return an error of one line for an operating-system error: the action, the file and the reason.

    >>> str(refusal("write", Path("/x"), OSError(errno.EACCES, "Permission denied")))
    'cannot write /x: Permission denied'
    """
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = next((parent for parent in path.parents if parent.exists()), Path("/"))
        reason += f" ({shutil.disk_usage(folder).free / 1e6:.0f} MB free)"
    return CheckpointError(f"cannot {doing} {path}: {reason}")


@contextmanager
def refusing(doing: str, path: Path) -> Iterator[None]:
    """Turn operating-system errors of the block, which is `doing` something to `path`, into a `refusal`."""
    try:
        yield
    except OSError as error:
        raise refusal(doing, path, error) from error


class HashedFile:
    """A new file whose XXH3 is computed from the bytes as they are written, so nothing is read back.

    Leaving the `with` block syncs the file and sets `record`. An error removes nothing: the owner of the folder does
    that. `size`, the number of bytes that will be written, is for writers that reserve space.
    """

    record: FileRecord

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        self._hash = xxhash.xxh3_64()
        self._bytes = 0
        with refusing("create", path):
            self._file = self._open(size)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            self._hash.update(block)
            with refusing("write", self.path):
                self._append(block)
        self._bytes += len(view)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with refusing("sync", self.path):
            self._close(sync=kind is None)
        if kind is None:
            self.record = FileRecord(self._bytes, self._hash.hexdigest())

    def _open(self, size: int) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def _append(self, block: memoryview) -> None:
        while block:  # a short write (a signal, Linux's limit of 2 GiB) is continued
            block = block[os.write(self._file, block) :]

    def _close(self, sync: bool) -> None:
        try:
            if sync:
                os.fsync(self._file)
        finally:
            os.close(self._file)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write and sync a new small file; return its record."""
    with HashedFile(path) as file:
        file.write(data)
    return file.record


def hash_file(path: Path, sync: bool = False) -> FileRecord:
    """Read `path` once and return its size and XXH3; `sync` also flushes it to the disk."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_64)
        if sync:
            os.fsync(file.fileno())
        return FileRecord(file.tell(), digest.hexdigest())


def make_folder(path: Path) -> None:
    """Create `path` and the folders above it, durably."""
    try:
        files.make_folder(path)
    except OSError as error:
        raise refusal("create", Path(error.filename or path), error) from error


def replace_text(path: Path, text: str) -> None:
    """Replace the content of `path` by `text`, atomically and durably."""
    with refusing("replace", path):
        files.replace_file(path, text.encode())


def discard(path: Path) -> None:
    """Remove a checkpoint folder so that no crash leaves a partial one under its name."""
    with refusing("remove", path):
        files.remove_folder(path)


def locked(root: Path, wait_seconds: float = LOCK_SECONDS) -> AbstractContextManager[bool]:
    """Hold the folder's lock; then every `*.tmp-*` in `root` except the holder's own was left by a dead process.

    Yields False if the file system has no locks: leftovers must then not be touched. Raises FolderBusy after
    `wait_seconds`.
    """
    return held(root / ".lock", wait_seconds, f"another process is saving into {root}; give this run another folder")


@contextmanager
def in_use(root: Path) -> Iterator[None]:
    """Reserve `root` for one run while it lives: two runs would overwrite each other's steps.

    Like `locked`, the lock is released however the process dies. Raises FolderBusy if another run keeps it for
    `RELEASE_SECONDS`. The locked file holds the run's id, and is not removed.
    """
    busy = f"another run is using {root}; wait until it has ended, or give this run another folder"
    with held(root / RUN, RELEASE_SECONDS, busy):
        if run_id(root) is None:
            new_run_id(root)
        yield


def run_id(root: Path) -> str | None:
    """Return the id of the run whose checkpoints are in `root`; None if no run has begun there."""
    file = root / RUN
    return (file.read_text() if file.exists() else "") or None


def new_run_id(root: Path) -> None:
    """Give `root` a new run id, so that from now on it belongs to another run."""
    (root / RUN).write_text(secrets.token_hex(8))


@contextmanager
def held(path: Path, wait_seconds: float, busy: str) -> Iterator[bool]:
    """Hold the lock file `path`. Raises FolderBusy with the message `busy` if another process has it."""
    with ExitStack() as stack:
        try:
            taken = stack.enter_context(files.locked(path, wait_seconds))
        except TimeoutError:
            raise FolderBusy(busy) from None
        except OSError as error:
            raise refusal("create" if error.filename else "lock", path, error) from error
        yield taken
