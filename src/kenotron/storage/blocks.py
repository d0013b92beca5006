"""A cache on this machine, of bounded size, of blocks of remote files.

    <folder>/
    ├── 3f/3f9a…     one block: its bytes, then their XXH3 (8 bytes)
    ├── whole/…      a complete file that is mapped, such as an index of documents
    └── size         bytes of all of them; its lock is held during changes

A name is a hash of (URL, version of the file, bytes from – to), so the cache is never out of date. Ranks and runs share
the folder: a file is complete or does not exist, the total never exceeds the cap, and a deleted file is fetched again.
Files are evicted by their times, least recently used first. The system's page cache serves as the cache in memory.
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
from kenotron.config.remote_data import RemoteData
from kenotron.storage.files import cache_root, locked, replace_file, temporary_beside

CHECKSUM = 8
LEFT_OVER = 24 * 3600.0
"""Seconds after which an unfinished file is considered abandoned."""


@lru_cache
def block_store(settings: RemoteData) -> BlockStore:
    """Return the store of these settings, one per process."""
    folder = Path(settings.cache_folder) if settings.cache_folder else cache_root() / "remote"
    return BlockStore(folder, int(settings.cache_gb * 1e9))


class BlockStore:
    """See the module. `cap` is in bytes."""

    def __init__(self, folder: Path, cap: int) -> None:
        self.folder, self.cap = folder, cap
        self._sound: set[str] = set()  # blocks whose checksum this process has verified

    def holds(self, name: str, size: int) -> bool:
        """Return whether a block of `size` bytes is in the cache."""
        try:
            return os.stat(self._place(name)).st_size == size + CHECKSUM
        except OSError:
            return False

    def read(self, name: str, size: int, start: int, stop: int) -> bytes | None:
        """Return bytes [start, stop) of a block of `size` bytes, or None if it is missing or damaged."""
        try:
            descriptor = os.open(self._place(name), os.O_RDONLY)
        except OSError:
            return None
        try:
            if os.fstat(descriptor).st_size != size + CHECKSUM:
                return None
            with contextlib.suppress(OSError):  # another user's folder: do not update times
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
        """Store a block, unless it is larger than the cap."""
        size = len(data) + CHECKSUM
        if size > self.cap:
            return
        place = self._place(name)
        with self._explained(), self._room(size):
            place.parent.mkdir(exist_ok=True)
            # The lock is held, so no other process writes under this name.
            unfinished = place.with_name(f"{place.name}.tmp")
            replace_file(place, data + xxhash.xxh3_64_digest(data), durable=False, temporary=unfinished)

    def mapped_file(self, name: str, size: int, content: Iterable[bytes], url: str) -> NDArray[np.uint8]:
        """Return a complete file ``[size]``, mapped; if it is not cached, one process writes `content` to it.

        Raises InputError if it is larger than the cap.
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
            with self._room(size):  # counted from now on, by its length
                partial = place.with_name(f"{temporary_beside(place).name}.tmp")
                handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # with the umask
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
        """Hold the lock, free space for `size` more bytes, and add them to the total."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "size"
        with locked(file):
            text = file.read_bytes()
            total = int(text) if text.isdigit() else None
            if total is None or total + size > self.cap:
                total = self._shrink(size)
            os.truncate(file, 0)  # if this process is killed, the next one counts again
            yield
            file.write_bytes(b"%d" % (total + size))

    def _shrink(self, size: int) -> int:
        """Remove the least recently used files until `size` fits and a tenth is free; return the remaining bytes."""
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
