"""Local and remote paths with one interface for readers of files, and the registry of storages.

    as_path("data/code")             pathlib.Path
    as_path("s3://bucket/tokens")    RemotePath of the storage that is registered for `s3`

A storage is imported for the first URL of its scheme. `fsspec_storage.FsspecPath` serves all schemes of fsspec (s3, gs,
hf, https, and those that packages register with fsspec). A package can register its own storage for a scheme as an
entry point of `kenotron.storage`, a function ``(url, settings) -> RemotePath``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kenotron.config.dotted import import_dotted, import_registered
from kenotron.config.errors import InputError
from kenotron.config.remote_data import RemoteData, is_remote

STORAGES = "kenotron.storage"
"""The group of entry points under which packages register storages, by the scheme of their URLs."""

FSSPEC = "kenotron.storage.fsspec_storage.FsspecPath"
"""The storage of all other schemes."""


class RemoteStat(NamedTuple):
    """The size of a file in bytes, and its version, which changes with its content."""

    st_size: int
    version: str


Fetched = Mapping[Hashable, Future[bytes]]
"""Blocks of remote files in flight."""


class RemoteArray(ABC):
    """A one-dimensional array in a remote file, read by slices of step 1 and by single items, from any thread."""

    dtype: np.dtype

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, start: int, stop: int) -> dict[Hashable, Future[bytes]]:
        """Start to fetch items [start, stop), and return the blocks of the file in flight."""

    @abstractmethod
    def read(self, start: int, stop: int, fetched: Fetched) -> NDArray:
        """Return items [start, stop), from `fetched` if it has them. Raises InputError if they cannot be read."""

    @property
    def itemsize(self) -> int:
        """The size of an item in bytes."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The size of all items in bytes."""
        return len(self) * self.itemsize

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            at = range(len(self))[key]  # handles negative indices and IndexError
            return self.read(at, at + 1, self.fetch(at, at + 1))[0]
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise IndexError("a remote array is sliced with step 1")
        if start >= stop:
            return np.empty(0, self.dtype)
        return self.read(start, stop, self.fetch(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray:
        return np.asarray(self[:], dtype=dtype)


@dataclass(frozen=True, order=True)
class RemotePath(ABC):
    """A file or folder by its URL, with the methods of `pathlib.Path` that readers of files use."""

    url: str
    settings: RemoteData = field(default=RemoteData(), compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    # ---- names ----

    @cached_property
    def _parts(self) -> tuple[str, PurePosixPath, str]:
        """Return scheme, path, and for a web address the query with its question mark."""
        scheme, _, rest = self.url.partition("://")
        path, mark, query = rest.partition("?") if scheme in ("http", "https") else (rest, "", "")
        return scheme, PurePosixPath(path), mark + query

    def _at(self, path: PurePosixPath) -> RemotePath:
        return replace(self, url=f"{self._parts[0]}://{path}{self._parts[2]}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._parts[1].name

    @property
    def suffix(self) -> str:
        """The suffix of the name, with its dot."""
        return self._parts[1].suffix

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self._parts[1].stem

    @property
    def parent(self) -> RemotePath:
        """The folder that contains it."""
        return self._at(self._parts[1].parent)

    def with_name(self, name: str) -> RemotePath:
        """Return another file of the same folder."""
        return self._at(self._parts[1].with_name(name))

    def with_suffix(self, suffix: str) -> RemotePath:
        """Return the file with another suffix."""
        return self._at(self._parts[1].with_suffix(suffix))

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(self._parts[1] / name)

    def relative_to(self, other: RemotePath) -> Path:
        """Return the path relative to `other`."""
        return Path(self._parts[1].relative_to(other._parts[1]))

    def absolute(self) -> RemotePath:
        """Return itself, since a URL is absolute."""
        return self

    # ---- implemented by storages ----

    @abstractmethod
    def stat(self) -> RemoteStat:
        """Return size and version. Raises FileNotFoundError, and InputError if the storage is unreachable."""

    @abstractmethod
    def is_file(self) -> bool:
        """Return whether it is an existing file."""

    @abstractmethod
    def is_dir(self) -> bool:
        """Return whether it is an existing folder."""

    @abstractmethod
    def walk(self) -> Iterator[RemotePath]:
        """Yield every file below this folder, in order of path, without hidden folders."""

    @abstractmethod
    def open(self, mode: str = "rb") -> IO[bytes]:
        """Return a stream to read from; `mode` must be "rb"."""

    @abstractmethod
    def map_array(self, dtype: np.dtype, offset: int, count: int, download: bool) -> RemoteArray | NDArray:
        """Return `count` items of `dtype` at byte `offset` of the file; with `download`, from a mapped local copy."""

    def exists(self) -> bool:
        """Return whether it is an existing file or folder."""
        return self.is_file() or self.is_dir()

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of a text file."""
        with self.open() as stream:
            return stream.read().decode(encoding)


AnyPath: TypeAlias = Path | RemotePath


def as_path(path: str | AnyPath, settings: RemoteData | None = None) -> AnyPath:
    """Return the path that a string names; `~` is the home folder. Raises InputError for an unknown scheme, or if its
    driver is not installed."""
    if isinstance(path, RemotePath):
        return path
    if not is_remote(path):
        return Path(path).expanduser()
    url = str(path)
    scheme, _, place = url.partition("://")
    if not place:
        raise InputError(f"{url}: expected a path after {scheme}://")
    return storage_of(scheme)(url.rstrip("/"), settings or RemoteData())


def one_spelling(path: str) -> str:
    """Return the normalized path: absolute, and without a slash at the end."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(os.path.expanduser(path))


def walk(folder: AnyPath) -> Iterator[AnyPath]:
    """Yield every file below `folder`, following links, but each folder only once.

    Hidden folders are left out, because they have unfinished work. Raises InputError for an unreadable folder.
    """
    if isinstance(folder, RemotePath):
        yield from folder.walk()
        return

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot read: {error.strerror}") from None

    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            yield Path(parent, name)


@lru_cache
def storage_of(scheme: str) -> Callable[[str, RemoteData], RemotePath]:
    """Return the function that makes paths of URLs of `scheme`: a registered storage's, else fsspec's."""
    if entry_points(group=STORAGES, name=scheme):
        return import_registered(scheme, f"{scheme}://", STORAGES)
    return import_dotted(FSSPEC, f"{scheme}://")
