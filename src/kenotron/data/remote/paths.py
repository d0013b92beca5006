"""A path on another machine that answers like `pathlib.Path`, as far as readers of files ask.

folder = as_path("s3://bucket/tokens", settings)
for file in folder.walk():                     one listing, which then answers for every file of it:
    file.stat().st_size, file.with_suffix(".idx").exists()
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeAlias

from kenotron.config.errors import InputError
from kenotron.config.remote import RemoteData

from .drivers import filesystem, version_of
from .fetching import Block, RemoteFile, attempt, look, read_block

BLOCK = 1 << 22
"""Bytes that are fetched at once where files are read from end to end, or fit in the cache."""

SPARSE_BLOCK = 1 << 16
"""Bytes fetched at once where samples are picked out of more than the cache holds."""


class RemoteStat(NamedTuple):
    """Bytes of a file, and what changes with its content."""

    st_size: int
    version: str


class Listing(dict[str, RemoteStat]):
    """What a folder holds, by URL."""

    @cached_property
    def size(self) -> int:
        """Bytes of all."""
        return sum(found.st_size for found in self.values())


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder by its URL. `listing` holds what is known of the files around it: others are not there."""

    url: str
    settings: RemoteData = field(default=RemoteData(), compare=False, repr=False)
    listing: Listing | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    # ---- names ----

    @cached_property
    def _parts(self) -> tuple[str, PurePosixPath, str]:
        """Protocol, path, and of a web address the query with its question mark."""
        protocol, _, rest = self.url.partition("://")
        path, mark, query = rest.partition("?") if protocol in ("http", "https") else (rest, "", "")
        return protocol, PurePosixPath(path), mark + query

    def _at(self, path: PurePosixPath) -> RemotePath:
        return replace(self, url=f"{self._parts[0]}://{path}{self._parts[2]}")

    @property
    def name(self) -> str:
        return self._parts[1].name

    @property
    def suffix(self) -> str:
        return self._parts[1].suffix

    @property
    def stem(self) -> str:
        return self._parts[1].stem

    @property
    def parent(self) -> RemotePath:
        return self._at(self._parts[1].parent)

    def with_name(self, name: str) -> RemotePath:
        return self._at(self._parts[1].with_name(name))

    def with_suffix(self, suffix: str) -> RemotePath:
        return self._at(self._parts[1].with_suffix(suffix))

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(self._parts[1] / name)

    def relative_to(self, other: RemotePath) -> Path:
        return Path(self._parts[1].relative_to(other._parts[1]))

    def absolute(self) -> RemotePath:
        return self

    # ---- what is there ----

    def stat(self) -> RemoteStat:
        """Errors: FileNotFoundError; InputError where the other side cannot be asked."""
        if self.listing is not None:
            if self.url not in self.listing:
                raise FileNotFoundError(self.url)
            return self.listing[self.url]
        return _stat(self.url, look(self.url, self.settings))

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        if self.listing is not None:
            return self.url in self.listing
        try:
            return look(self.url, self.settings)["type"] == "file"
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        if self.listing is not None:
            return any(url.startswith(self.url.rstrip("/") + "/") for url in self.listing)
        try:
            return look(self.url, self.settings)["type"] == "directory"
        except FileNotFoundError:
            return False

    def walk(self) -> Iterator[RemotePath]:
        """Every file below this folder, in order of path, hidden folders left out."""
        fs = filesystem(self.url)
        found = attempt(self.url, self.settings.tries, lambda: fs.find(self.url, detail=True))
        root = fs._strip_protocol(self.url).rstrip("/") + "/"
        base = self.url.rstrip("/")
        listing = Listing(
            (f"{base}/{name.removeprefix(root)}", _stat(name, info))
            for name, info in found.items()
            if info["type"] == "file" and name.startswith(root)
        )
        for url in sorted(listing):
            folders = url.removeprefix(base + "/").split("/")[:-1]
            if not any(folder.startswith(".") for folder in folders):
                yield RemotePath(url, self.settings, listing)

    # ---- what is in it ----

    def file(self) -> RemoteFile:
        """This version of it."""
        found = self.stat()
        return RemoteFile(self.url, found.st_size, found.version, self.settings)

    @property
    def block_size(self) -> int:
        """For reads here and there: large where everything around fits in the cache, else small."""
        around = self.listing.size if self.listing else self.stat().st_size
        return BLOCK if 2 * around <= self.settings.cache_gb * 1e9 else SPARSE_BLOCK

    def open(self, mode: str = "rb") -> IO[bytes]:
        """A stream that is read block by block. Only "rb"."""
        assert mode == "rb"
        return io.BufferedReader(_Stream(self.file()), 1 << 17)

    def read_text(self, encoding: str = "utf-8") -> str:
        with self.open() as stream:
            return stream.read().decode(encoding)


AnyPath: TypeAlias = Path | RemotePath


def is_remote(path: object) -> bool:
    """Whether a path, in a config for example, lies on another machine."""
    return "://" in str(path)


def as_path(path: str | AnyPath, settings: RemoteData | None = None) -> AnyPath:
    """The path that a string names; `~` is the home folder. Errors (InputError): no such protocol or driver."""
    if isinstance(path, RemotePath):
        return path
    if not is_remote(path):
        return Path(path).expanduser()
    filesystem(str(path))
    return RemotePath(str(path).rstrip("/"), settings or RemoteData())


def _stat(url: str, info: dict[str, Any]) -> RemoteStat:
    if info["type"] == "file" and not isinstance(info.get("size"), int):
        raise InputError(f"{url}: its server does not tell how long it is")
    return RemoteStat(info.get("size") or 0, version_of(info))


class _Stream(io.RawIOBase):
    """Bytes of one version of a file."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._file.size)[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        size = self._file.size
        if self._place >= size:
            return 0
        start = self._place // BLOCK * BLOCK
        stop = min(start + BLOCK, size)
        first = self._place - start
        data = read_block(Block(self._file, start, stop), first, min(first + len(buffer), stop - start))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
