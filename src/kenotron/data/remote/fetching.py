"""Reading from another machine: retries, and blocks that are fetched once however many ask.

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

from kenotron.config.errors import InputError
from kenotron.config.remote import RemoteData

from ..hub import first_line
from . import drivers
from .blocks import block_store
from .drivers import CREDENTIALS, filesystem, read_range

T = TypeVar("T")

AT_ONCE = 32
"""Reads under way at the same time in one process."""

FIRST_WAIT = 0.5
"""Seconds before the second try, doubled before every later one, each times a random number around 1."""

LONGEST_WAIT = 60.0
"""Most seconds that a server may ask to wait for, by `Retry-After`."""


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


# ---- retries -----------------------------------------------------------------------------------------------


def look(url: str, settings: RemoteData) -> dict[str, Any]:
    """What the driver knows of a file or folder now. Errors: FileNotFoundError; InputError as in `attempt`."""
    fs = filesystem(url)
    return attempt(url, settings.tries, lambda: fs.info(url))


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
                known = CREDENTIALS.get(what.partition("://")[0]) if _is_denied(error) else None
                hint = f"; access comes from {known}" if known else ""
                raise InputError(f"{what}: cannot be read ({words}){hint}") from None
            if number == tries:
                raise InputError(f"{what}: cannot be read, tried {tries} times ({words})") from None
            if number > 1:
                print(f"warning: {what}: try {number} of {tries} failed ({words})", file=sys.stderr, flush=True)
            time.sleep(max(FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.75, 1.25), _asked_wait(error)))
    raise AssertionError("unreachable")


PASSING = (408, 425, 429)
"""Answers of HTTP below 500 that another try may mend."""


def _is_final(error: BaseException) -> bool:
    """Whether another try would fail in the same way: not allowed, no credentials, no such request."""
    status = _status(error)
    if 400 <= status < 500:
        return status not in PASSING
    final = (IsADirectoryError, NotADirectoryError, ValueError, TypeError, AttributeError)
    return _is_denied(error) or isinstance(error, (*final, NotImplementedError, ImportError))


def _is_denied(error: BaseException) -> bool:
    """Whether who asks may not read it, or is not known."""
    name = type(error).__name__
    botocore = "Credential" in name or "Profile" in name or "Token" in name
    return botocore or isinstance(error, PermissionError) or _status(error) in (401, 403)


def _status(error: BaseException) -> int:
    """The answer of HTTP that an error of some library tells; 0 where it tells none."""
    named = ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code"))
    told = (getattr(holder, name, None) for holder, name in named)
    return next((status for status in told if isinstance(status, int)), 0)


def _asked_wait(error: BaseException) -> float:
    """Seconds to wait before another try, as the `Retry-After` of an answer asks for; at most `LONGEST_WAIT`."""
    for each in (error, error.__cause__):  # s3fs raises its own from botocore's, whose answer is a dictionary
        answer = getattr(each, "response", None)
        told = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
        headers = told.get("HTTPHeaders") or getattr(each, "headers", None) or getattr(answer, "headers", None) or {}
        text = next((str(headers[name]) for name in headers if name.lower() == "retry-after"), "")
        if text.strip().isdigit():
            return min(float(text), LONGEST_WAIT)
    return 0.0


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
    drivers.forget()


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
        data, found = read_range(fs, file.url, block.start, block.stop)
        if found != (file.size, file.version):
            raise InputError(f"{file.url}: the file has changed since it was opened")
        if len(data) == file.size > expected:
            raise InputError(f"{file.url}: its server sends the whole file for a part of it; bring the file here first")
        if len(data) != expected:
            raise OSError(f"expected {expected} bytes, got {len(data)}")
        return data

    try:
        data = attempt(where, file.settings.tries, read)
    except FileNotFoundError:
        raise InputError(f"{file.url}: the file has vanished since it was opened") from None
    block_store(file.settings).keep(block.name, data)
    return data
