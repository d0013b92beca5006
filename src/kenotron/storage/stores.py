"""Write to other machines: S3, Google's storage, and all other stores that fsspec writes to.

    store = Store("s3://bucket/runs/a", settings)
    store.upload("10/model/rank0.safetensors", file)      # in parts if it is large; then compared with the file
    store.put("latest.txt", b"10")
    store.sizes()                                         # {"10/model/rank0.safetensors": 1542000, "latest.txt": 2}

Everything is tried `remote_data.tries` times with growing waits; S3's parts are also retried one by one. A sent object
is compared with its file by its length and the store's MD5 (S3's ETag, Google's md5Hash), or if there is none (KMS
encryption, other stores), by reading it back.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fsspec.callbacks import Callback

from kenotron.config.errors import InputError
from kenotron.config.remote_data import RemoteData
from kenotron.storage.drivers import FileInfo, filesystem, version_of
from kenotron.storage.fetching import RemoteFile, list_files, stream, with_retries

T = TypeVar("T")

PART = 16 << 20
"""Bytes of a part of an upload, and of one read; more if a file would have more than `MOST_PARTS`."""

MOST_PARTS = 10_000
"""The number of parts that S3 allows."""

PART_TRIES = 5
"""Attempts per part of an upload to S3."""

PARTS_AT_ONCE = 5

Sent = Callable[[int], None]


class Store:
    """The objects below `url`, by their names relative to it."""

    def __init__(self, url: str, settings: RemoteData | None = None, parts_at_once: int = PARTS_AT_ONCE) -> None:
        """Raise InputError for an unknown protocol, or if its driver is not installed."""
        self.url = url.rstrip("/")
        self._settings = settings or RemoteData()
        self._parts_at_once = parts_at_once
        assert self._fs is not None

    @property
    def _fs(self) -> Any:
        return filesystem(self.url)  # not stored: a forked process opens its own

    def at(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def _try(self, name: str, act: Callable[[], T], doing: str = "read") -> T:
        return with_retries(self.at(name), self._settings.tries, act, opening=True, doing=doing)

    # ---- reading ----

    def sizes(self, below: str = "") -> dict[str, int]:
        """Return name → bytes of every object, or of those in the folder `below`. Raises InputError."""
        try:
            found = list_files(self.at(below), self._settings.tries, "listed")
        except FileNotFoundError:
            return {}
        return {f"{below}/{name}" if below else name: info["size"] or 0 for name, info in found.items()}

    def read(self, name: str) -> bytes:
        """Return the content of a small object. Raises FileNotFoundError or InputError."""
        return self._try(name, lambda: self._fs.cat_file(self.at(name)))

    def version(self, name: str) -> tuple[int, str] | None:
        """Return size and version of an object; None if there is none. Raises InputError."""
        try:
            info = self._try(name, lambda: self._info(name))
        except FileNotFoundError:
            return None
        return info["size"], version_of(info)

    def stream(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of an object in pieces, some fetched ahead. Raises FileNotFoundError or InputError."""
        found = self.version(name)
        if found is None:
            raise FileNotFoundError(self.at(name))
        return stream(RemoteFile(self.at(name), *found, self._settings), PART)

    def _info(self, name: str) -> FileInfo:
        info = self._fs.info(self.at(name))
        if info["type"] != "file":
            raise FileNotFoundError(self.at(name))
        return info

    # ---- writing ----

    def put(self, name: str, data: bytes) -> None:
        """Write a small object, and read it back. Raises InputError."""

        def send() -> None:
            self._make_folder(name)
            self._fs.pipe_file(self.at(name), data)
            if self._fs.cat_file(self.at(name)) != data:
                raise OSError("what is read back is not what was written")

        self._write(name, send)

    def upload(self, name: str, file: Path, sent: Sent = lambda count: None) -> None:
        """Write a file, and compare the object with it.

        `sent` is called with the number of bytes sent so far. Raises FileNotFoundError if the file is gone, and
        InputError with the object's name.
        """

        progress = Callback(hooks={"sent": lambda size, value: sent(value)})

        def send() -> None:
            self._make_folder(name)
            progress.absolute_update(0)
            size = file.stat().st_size
            in_parts = filesystem(self.url, PART_TRIES)  # so that one failed part does not resend a whole file
            in_parts.put_file(str(file), self.at(name), callback=progress, **self._options(size))
            if not self._equals(name, file):
                raise OSError("what arrived is not what was sent")

        try:
            self._write(name, send)
        except InputError:
            file.stat()
            raise

    def holds(self, name: str, file: Path) -> bool:
        """Return whether an object has the bytes of `file`. Raises InputError."""
        return self._try(name, lambda: self._equals(name, file))

    def _equals(self, name: str, file: Path) -> bool:
        """Return whether the object equals the file, by length and the store's MD5, or else by reading it back."""
        info, size = self._info(name), file.stat().st_size
        if info["size"] != size:
            return False
        return self._same_md5(info, file, size) or self._same_bytes(name, file)

    def delete(self, name: str) -> None:
        """Remove an object, if it exists. Raises InputError."""
        with suppress(FileNotFoundError):
            self._try(name, lambda: self._fs.rm_file(self.at(name)), "removed")

    def _write(self, name: str, send: Callable[[], T]) -> T:
        try:
            return self._try(name, send, "written")
        except FileNotFoundError:
            raise InputError(f"{self.at(name)}: cannot be written: there is no such bucket or folder") from None

    def _make_folder(self, name: str) -> None:
        if not hasattr(self._fs, "_put_file"):  # asynchronous drivers belong to stores without folders
            self._fs.makedirs(self.at(name).rpartition("/")[0], exist_ok=True)

    def _options(self, size: int) -> dict[str, Any]:
        if not self.url.startswith(("s3://", "s3a://")):
            return {}
        return {"chunksize": part_size(size), "max_concurrency": self._parts_at_once}

    def _same_md5(self, info: FileInfo, file: Path, size: int) -> bool:
        """Return whether the store has the file's MD5; False if it has none."""
        if "md5Hash" in info:
            return info["md5Hash"] == base64.b64encode(_md5(file, size)).decode()
        tag = str(info.get("ETag", "")).strip('"')
        part = part_size(size)
        if "-" not in tag:
            return len(tag) == 32 and tag == _md5(file, size).hex()
        digests = [_md5(file, part, start) for start in range(0, size, part)]
        return tag == f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"

    def _same_bytes(self, name: str, file: Path) -> bool:
        with open(file, "rb") as here:
            return all(here.read(len(data)) == data for data in self.stream(name))


def part_size(size: int) -> int:
    """Return the part size for a file of `size` bytes, a function of the size, so that its ETag can be recomputed."""
    return max(PART, -(-size // MOST_PARTS))


def _md5(file: Path, count: int, start: int = 0) -> bytes:
    """Return the MD5 of up to `count` bytes of a file."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(file, "rb") as stream:
        stream.seek(start)
        while count > 0 and (data := stream.read(min(count, 1 << 20))):
            digest.update(data)
            count -= len(data)
    return digest.digest()
