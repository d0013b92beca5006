"""The storage of all schemes that fsspec supports (s3, gs, hf, https, …), read in blocks that are cached.

path = FsspecPath("s3://bucket/tokens", settings)
for file in path.walk():                one listing, which is used for all its files:
    file.stat().st_size, file.with_suffix(".idx").exists()

tokens = file.map_array(uint16, 0, n, download=False)
tokens[8000:8100]                       their block is fetched and cached; the next read is from disk
"""

import io
import os
from collections.abc import Hashable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.storage import fetching
from kenotron.storage.blocks import block_store
from kenotron.storage.drivers import filesystem, version_of
from kenotron.storage.fetching import CachedBlock, RemoteFile, file_info, list_files, read_block, request_block, stream
from kenotron.storage.paths import Fetched, RemoteArray, RemotePath, RemoteStat


class Listing(dict[str, RemoteStat]):
    """URL → the file's stat, for the files of a folder."""

    @cached_property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(found.st_size for found in self.values())


@dataclass(frozen=True, order=True)
class FsspecPath(RemotePath):
    """A file or folder by its URL. If it has a `listing` of its folder, only the files in it exist."""

    listing: Listing | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise InputError for an unknown scheme, or if its driver is not installed."""
        filesystem(self.url)

    def stat(self) -> RemoteStat:
        """Return the stat from the listing, else from the driver."""
        if self.listing is not None:
            if self.url not in self.listing:
                raise FileNotFoundError(self.url)
            return self.listing[self.url]
        return _stat(self.url, file_info(self.url, self.settings))

    def is_file(self) -> bool:
        """Return whether it is a file, by the listing, else the driver."""
        if self.listing is not None:
            return self.url in self.listing
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether it is a folder, by the listing, else the driver."""
        if self.listing is not None:
            return any(url.startswith(self.url.rstrip("/") + "/") for url in self.listing)
        return self._kind() == "directory"

    def _kind(self) -> str | None:
        try:
            return file_info(self.url, self.settings)["type"]
        except FileNotFoundError:
            return None

    def walk(self) -> Iterator[RemotePath]:
        """Yield the files of one listing, which all the paths share."""
        base = self.url.rstrip("/")
        found = list_files(self.url, self.settings.tries)
        listing = Listing((f"{base}/{name}", _stat(f"{base}/{name}", info)) for name, info in found.items())
        for url in sorted(listing):
            folders = url.removeprefix(base + "/").split("/")[:-1]
            if not any(folder.startswith(".") for folder in folders):
                yield FsspecPath(url, self.settings, listing)

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Return a stream that is read block by block."""
        assert mode == "rb"
        file = self.file()
        return io.BufferedReader(_Stream(BlockArray(file, np.dtype(np.uint8), 0, file.size, fetching.BLOCK)), 1 << 17)

    def map_array(self, dtype: np.dtype, offset: int, count: int, download: bool) -> RemoteArray | NDArray:
        """Return a `BlockArray`, or with `download` a mapped local copy. Raises InputError if larger than the cache."""
        file = self.file()
        if download:  # a complete mapped copy, for an index with random access
            name = CachedBlock(file, 0, file.size).name
            data = block_store(file.settings).mapped_file(name, file.size, stream(file), file.url)
            return np.frombuffer(data, dtype, count, offset)
        return BlockArray(file, dtype, offset, count, self.block_size)

    def file(self) -> RemoteFile:
        """Return the current version of the file."""
        found = self.stat()
        return RemoteFile(self.url, found.st_size, found.version, self.settings)

    @property
    def block_size(self) -> int:
        """The block size for random reads: large if all files of the folder fit in the cache, else small."""
        around = self.listing.size if self.listing else self.stat().st_size
        return fetching.BLOCK if 2 * around <= self.settings.cache_gb * 1e9 else fetching.SPARSE_BLOCK


class BlockArray(RemoteArray):
    """`count` items of `dtype` at byte `offset` of a remote file, fetched in blocks of `block` bytes."""

    def __init__(self, file: RemoteFile, dtype: np.dtype, offset: int, count: int, block: int) -> None:
        self.file, self.dtype = file, dtype
        self._offset, self._count, self._block = offset, count, block

    def __len__(self) -> int:
        return self._count

    def fetch(self, start: int, stop: int) -> dict[Hashable, Future[bytes]]:
        """Start to fetch the blocks of items [start, stop) that are not in the cache."""
        requests = {block: request_block(block) for block in self._blocks(start, stop)}
        return {block: future for block, future in requests.items() if future is not None}

    def read(self, start: int, stop: int, fetched: Fetched) -> NDArray:
        """Return items [start, stop) from `fetched` or the cache, or fetch them now."""
        first, end = self._offset + start * self.itemsize, self._offset + stop * self.itemsize
        parts = []
        for block in self._blocks(start, stop):
            low, high = max(first, block.start) - block.start, min(end, block.stop) - block.start
            data = _result(fetched.get(block))
            parts.append(read_block(block, low, high) if data is None else data[low:high])
        return np.frombuffer(b"".join(parts), self.dtype)

    def _blocks(self, start: int, stop: int) -> Iterator[CachedBlock]:
        """Yield the blocks of items [start, stop), which count from byte 0 of the file; the last one ends with it."""
        first, end = self._offset + start * self.itemsize, self._offset + stop * self.itemsize
        for at in range(first // self._block * self._block, end, self._block):
            yield CachedBlock(self.file, at, min(at + self._block, self.file.size))


def _result(future: Future[bytes] | None) -> bytes | None:
    """Return the block, or None if it is not in flight (any more)."""
    if future is None:
        return None
    try:
        return future.result()
    except CancelledError:
        return None


def _stat(url: str, info: dict[str, Any]) -> RemoteStat:
    if info["type"] == "file" and not isinstance(info.get("size"), int):
        raise InputError(f"{url}: its server does not send the length of the file")
    return RemoteStat(info.get("size") or 0, version_of(info))


class _Stream(io.RawIOBase):
    """The bytes of one version of a file."""

    def __init__(self, content: BlockArray) -> None:
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, len(self._content))[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        next_block = (self._position // fetching.BLOCK + 1) * fetching.BLOCK  # may not be needed
        data = self._content[self._position : min(self._position + len(buffer), next_block)].tobytes()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
