"""What was read of remote files, kept on this machine up to a cap.

    <folder>/
    ├── 3f/3f9a…     one block: its bytes, then their XXH3 (8 bytes)
    ├── whole/…      a file that is mapped as a whole: an index of documents
    └── size         bytes of all these; its lock is held while they change

A name is a hash of (URL, version of the file, bytes from – to), so nothing here is ever out of date. Ranks and runs
share the folder: a file is complete or does not exist, the total never exceeds the cap, and a deleted file is fetched
again.
Recency is the time of the file. The page cache of the system is the cache in memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kenotron.config.errors import InputError, os_errors
from kenotron.config.remote import RemoteData
from kenotron.storage.files import cache_root, locked, replace_file, temporary_beside

CHECKSUM = 8
LEFT_OVER = 24 * 3600.0
"""Seconds after which an unfinished file is considered abandoned."""


@lru_cache
def block_store(settings: RemoteData) -> BlockStore:
    """The store of these settings, one a process."""
    folder = Path(settings.cache_folder) if settings.cache_folder else cache_root() / "remote"
    return BlockStore(folder, int(settings.cache_gb * 1e9))


class BlockStore:
    """See the module. `cap` in bytes."""

    def __init__(self, folder: Path, cap: int) -> None:
        self.folder, self.cap = folder, cap
        self._sound: set[str] = set()  # blocks whose checksum this process has seen

    def holds(self, name: str, size: int) -> bool:
        """Whether a block of `size` bytes is here."""
        try:
            return os.stat(self._place(name)).st_size == size + CHECKSUM
        except OSError:
            return False

    def read(self, name: str, size: int, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop) of a block of `size` bytes; None where it is missing or damaged."""
        try:
            descriptor = os.open(self._place(name), os.O_RDONLY)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_size != size + CHECKSUM:
                return None
            with contextlib.suppress(OSError):  # somebody else's folder: its order of use is theirs
                os.utime(descriptor)
            if name not in self._sound:
                whole = os.pread(descriptor, size + CHECKSUM, 0)
                if xxhash.xxh3_64_digest(whole[:size]) != whole[size:]:
                    return None
                self._sound.add(name)
                return whole[start:stop]
            data = os.pread(descriptor, stop - start, start)
            return data if len(data) == stop - start else None
        finally:
            os.close(descriptor)

    def keep(self, name: str, data: bytes) -> None:
        """Keep a block; one that is larger than the cap is not kept."""
        size = len(data) + CHECKSUM
        if size > self.cap:
            return
        place = self._place(name)
        with self._explained(), self._room(size):
            place.parent.mkdir(exist_ok=True)
            # The lock is held: no other process writes under this name.
            unfinished = place.with_name(f"{place.name}.tmp")
            replace_file(place, data + xxhash.xxh3_64_digest(data), durable=False, temporary=unfinished)

    def mapped_file(self, name: str, size: int, content: Iterable[bytes], url: str) -> NDArray[np.uint8]:
        """A complete file ``[size]``, mapped; one that is not in the cache gets `content`, in one process at a time.

        Raises InputError: it is larger than the cap.
        """
        if size == 0:
            return np.empty(0, np.uint8)
        place = self.folder / "whole" / name
        if size > self.cap:
            raise InputError(f"remote_data.cache_gb: {self.cap / 1e9:g} GB cannot hold {url}, {size / 1e9:g} GB")
        with self._explained():
            place.parent.mkdir(parents=True, exist_ok=True)
            if (found := _mapped(place, size)) is not None:
                return found
        with self._explained(), locked(place.parent / "lock"):
            if (found := _mapped(place, size)) is not None:
                return found
            with self._room(size):  # it counts from here on, by its length
                partial = place.with_name(f"{temporary_beside(place).name}.tmp")
                handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # by the umask
                os.truncate(handle, size)
            try:
                with open(handle, "r+b") as file:
                    file.writelines(content)
                    file.flush()
                    os.fsync(handle)
                    found = np.asarray(np.memmap(file, np.uint8, "r", shape=(size,)))  # before another can remove it
                os.replace(partial, place)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            return found

    def _place(self, name: str) -> Path:
        return self.folder / name[:2] / name

    @contextlib.contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Hold the lock of the total with room for `size` bytes more, which are added to it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "size"
        with locked(file):
            text = file.read_bytes()
            total = int(text) if text.isdigit() else None
            if total is None or total + size > self.cap:
                total = self._shrink(size)
            os.truncate(file, 0)  # a process that is killed here leaves no total: the next one counts
            yield
            file.write_bytes(b"%d" % (total + size))

    def _shrink(self, size: int) -> int:
        """Remove what was not used for longest until `size` fits and a tenth is free; the bytes that are left."""
        files: list[tuple[int, int, str]] = []
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(self.folder) for name in names]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(path)
                if path.endswith(".tmp") and time.time() - found.st_mtime > LEFT_OVER:
                    os.unlink(path)
                elif os.path.basename(path) not in ("size", "lock"):
                    files.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in files)
        if total + size <= self.cap:
            return total
        limit = min(self.cap - size, self.cap * 9 // 10)
        for _, bytes_of, path in sorted(files):
            if total <= limit:
                break
            if not path.endswith(".tmp"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= bytes_of
        return total

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        what = f"cannot write the cache of remote files {self.folder}"
        return os_errors(what, "; set remote_data.cache_folder to a writable folder with space")


def _mapped(place: Path, size: int) -> NDArray[np.uint8] | None:
    try:
        with open(place, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            with contextlib.suppress(OSError):
                os.utime(file.fileno())
            return np.asarray(np.memmap(file, np.uint8, "r", shape=(size,)))
    except FileNotFoundError:
        return None
