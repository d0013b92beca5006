"""Reading from another machine: drivers, retries, and blocks that are fetched once however many ask.

    try 1 ✗   0.5 s   try 2 ✗ (told)   1 s   try 3 ✓          a failure that no retry mends is told at once

A version of a file (`RemoteFile`) is its size and its ETag, or what the protocol has in its place. It is looked at
again after every read, so that no run trains on a mixture of two versions.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from kenotron.config.errors import InputError, nearest
from kenotron.config.remote import RemoteData

from ..hub import first_line
from .blocks import block_store

T = TypeVar("T")

AT_ONCE = 32
"""Reads under way at the same time in one process."""

FIRST_WAIT = 0.5
"""Seconds before the second try, doubled before every later one, each times a random number around 1."""

_ONE_TRY: dict[str, Any] = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
OPTIONS = {"s3": _ONE_TRY, "s3a": _ONE_TRY}
"""What drivers are opened with: retries of botocore would multiply ours and say nothing."""

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
"""Protocols whose driver is an extra of this package."""

VERSIONS = (
    "ETag",
    "etag",
    "generation",
    "md5Hash",
    "blob_id",
    "oid",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)
"""What drivers call the thing that changes with a file."""


class RemoteFile(NamedTuple):
    """One version of a file on another machine."""

    url: str
    size: int
    version: str
    settings: RemoteData


class Block(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: RemoteFile
    start: int
    stop: int

    @property
    def name(self) -> str:
        text = f"{self.file.url}\n{self.file.version}\n{self.file.size}\n{self.start}-{self.stop}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---- drivers -----------------------------------------------------------------------------------------------


def filesystem(url: str) -> Any:
    """fsspec's file system for `url`, one a process and protocol.

    Errors (InputError): no such protocol; its driver is not installed.
    """
    protocol, _, place = url.partition("://")
    if not place:
        raise InputError(f"{url}: names no place; expected a path behind {protocol}://")
    return _filesystem(protocol)


@lru_cache
def _filesystem(protocol: str) -> Any:
    import fsspec

    try:
        found = fsspec.filesystem(protocol, use_listings_cache=False, **OPTIONS.get(protocol, {}))
    except ValueError:
        known = fsspec.available_protocols()
        raise InputError(f"{protocol}://: no such protocol{nearest(protocol, known)}") from None
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        hint = f"pip install kenotron[{extra}]" if extra else first_line(error)
        raise InputError(f"{protocol}://: its driver is not installed: {hint}") from None
    if protocol in OPTIONS:
        found.retries = 1  # s3fs's own
    return found


def version_of(info: dict[str, Any]) -> str:
    """What changes with the content of a file."""
    return next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def look(url: str, settings: RemoteData) -> dict[str, Any]:
    """What the driver knows of a file or folder now. Errors: FileNotFoundError; InputError as in `attempt`."""
    fs = filesystem(url)
    return attempt(url, settings.tries, lambda: fs.info(url))


# ---- retries -----------------------------------------------------------------------------------------------


def attempt(what: str, tries: int, read: Callable[[], T]) -> T:
    """``read()``, tried again with growing waits.

    Errors (InputError): `what` and the driver's own words after the last try, or at once where a retry mends nothing.
    """
    for number in range(1, tries + 1):
        try:
            return read()
        except (FileNotFoundError, InputError):
            raise
        except Exception as error:  # drivers raise whatever their libraries do
            words = f"{type(error).__name__}: {first_line(error)}"
            if _is_final(error):
                raise InputError(f"{what}: cannot be read ({words})") from None
            if number == tries:
                raise InputError(f"{what}: cannot be read, tried {tries} times ({words})") from None
            if number > 1:
                print(f"warning: {what}: try {number} of {tries} failed ({words})", file=sys.stderr, flush=True)
            time.sleep(FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.75, 1.25))
    raise AssertionError("unreachable")


PASSING = (408, 425, 429)
"""Answers of HTTP below 500 that another try may mend."""


def _is_final(error: BaseException) -> bool:
    """Whether another try would fail in the same way: not allowed, no credentials, no such request."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status not in PASSING
    if isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError):
        return True
    name = type(error).__name__
    if "Credential" in name or "Profile" in name or "Token" in name:  # botocore's
        return True
    return isinstance(error, ValueError | TypeError | AttributeError | NotImplementedError | ImportError)


# ---- blocks ------------------------------------------------------------------------------------------------


class _Flights:
    """The threads of this process, and the blocks they are fetching."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(AT_ONCE, "kenotron-remote")
        self.lock = threading.Lock()
        self.flying: dict[str, Future[bytes]] = {}


@lru_cache
def _flights() -> _Flights:
    return _Flights()


def _forget() -> None:
    """A forked process has none of its parent's threads and connections."""
    _flights.cache_clear()
    _filesystem.cache_clear()


os.register_at_fork(after_in_child=_forget)


def ask(block: Block) -> Future[bytes] | None:
    """Have `block` fetched and kept; None where it is here already. Who asks for one that is on its way shares it."""
    name = block.name
    if block_store(block.file.settings).holds(name, block.stop - block.start):
        return None
    flights = _flights()
    with flights.lock:
        if (future := flights.flying.get(name)) is None:
            future = flights.flying[name] = flights.pool.submit(_fetch, block)
            future.add_done_callback(lambda _: flights.flying.pop(name, None))
        return future


def read_block(block: Block, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of `block`, counted from its beginning; fetched where it is not here."""
    found = block_store(block.file.settings).read(block.name, block.stop - block.start, start, stop)
    return _fetch(block)[start:stop] if found is None else found


def _fetch(block: Block) -> bytes:
    """Errors (InputError): every try failed, or the file is another one by now."""
    file = block.file
    fs, expected = filesystem(file.url), block.stop - block.start
    where = f"{file.url}, bytes {block.start}-{block.stop - 1}"

    def read() -> bytes:
        try:
            data = fs.cat_file(file.url, start=block.start, end=block.stop)
        except Exception as error:
            if "range" not in str(error).lower():
                raise
            data = b""  # the file ends before: it has changed, or the error below is tried again
        found = fs.info(file.url)
        if (found["size"], version_of(found)) != (file.size, file.version):
            raise InputError(f"{file.url}: the file has changed since it was opened")
        if len(data) != expected:
            raise OSError(f"expected {expected} bytes, got {len(data)}")
        return data

    try:
        data = attempt(where, file.settings.tries, read)
    except FileNotFoundError:
        raise InputError(f"{file.url}: the file has vanished since it was opened") from None
    block_store(file.settings).keep(block.name, data)
    return data
