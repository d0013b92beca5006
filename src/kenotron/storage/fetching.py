"""Read from other machines, with retries, and with blocks that are fetched once for all threads.

    try 1 ✗   0.5 s   try 2 ✗ (logged)   1 s   try 3 ✓        a permanent failure is raised at once

A version of a file (`RemoteFile`) is its size and its ETag, or the protocol's equivalent. It is compared after every
read, so that no run trains on a mixture of two versions.
"""

import hashlib
import os
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeVar

from kenotron.config.errors import InputError, counted
from kenotron.config.remote_data import RemoteData
from kenotron.storage.blocks import block_store
from kenotron.storage.drivers import CREDENTIALS, FileInfo, filesystem, read_range
from kenotron.storage.hub import first_line

T = TypeVar("T")

BLOCK = 1 << 22
"""Bytes of a block if files are read completely, or fit in the cache."""

SPARSE_BLOCK = 1 << 16
"""Bytes of a block if samples are read from more data than fits in the cache."""

AT_ONCE = 32
"""The number of concurrent reads of one process."""

AHEAD = 8
"""The number of a stream's pieces that are fetched concurrently."""

FIRST_WAIT = 0.5
"""Seconds before the second try, doubled before every later one, and multiplied by a random number around 1."""

LONGEST_WAIT = 60.0
"""Longest wait in seconds that a server may request by `Retry-After`."""


class RemoteFile(NamedTuple):
    """One version of a file on another machine."""

    url: str
    size: int
    version: str
    settings: RemoteData


class CachedBlock(NamedTuple):
    """Bytes [start, stop) of a file."""

    file: RemoteFile
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Its name in the cache, a hash of URL, version and bytes."""
        text = f"{self.file.url}\n{self.file.version}\n{self.file.size}\n{self.start}-{self.stop}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---- retries -----------------------------------------------------------------------------------------------


def file_info(url: str, settings: RemoteData) -> FileInfo:
    """Return the driver's current `info` of a file or folder. Raises FileNotFoundError, and as `with_retries`."""
    fs = filesystem(url)
    return with_retries(url, settings.tries, lambda: fs.info(url), opening=True)


def list_files(url: str, tries: int, doing: str = "read") -> dict[str, FileInfo]:
    """Return the driver's `info` of every file below a folder, by relative path. Raises as `file_info`."""
    fs = filesystem(url)
    found = with_retries(url, tries, lambda: fs.find(url, detail=True), opening=True, doing=doing)
    root = fs._strip_protocol(url).rstrip("/") + "/"
    files = {name: info for name, info in found.items() if info["type"] == "file" and name.startswith(root)}
    return {name.removeprefix(root): info for name, info in files.items()}


def with_retries(what: str, tries: int, read: Callable[[], T], opening: bool = False, doing: str = "read") -> T:
    """Return ``read()``, tried up to `tries` times with growing waits.

    Raises InputError, with `what`, `doing` (a participle such as "read") and the driver's message, after the last try,
    or at once if a retry cannot help. When `opening`, an unknown host is such a case: the URL is mistyped, or this
    machine is offline.
    """
    for number in range(1, tries + 1):
        try:
            return read()
        except (FileNotFoundError, InputError):
            raise
        except Exception as error:  # drivers raise any error of their libraries
            words = f"{type(error).__name__}: {first_line(error)}"
            if _is_final(error) or (opening and _is_unknown_host(error)):
                known = CREDENTIALS.get(what.partition("://")[0]) if _is_denied(error) else None
                hint = f"; access comes from {known}" if known else ""
                raise InputError(f"{what}: cannot be {doing} ({words}){hint}") from None
            if number == tries:
                raise InputError(f"{what}: cannot be {doing}, tried {counted(tries, 'time')} ({words})") from None
            if number > 1:
                print(f"warning: {what}: try {number} of {tries} failed ({words})", file=sys.stderr, flush=True)
            time.sleep(max(FIRST_WAIT * 2 ** (number - 1) * random.uniform(0.75, 1.25), _asked_wait(error)))
    raise AssertionError("unreachable")


PASSING = (408, 425, 429)
"""HTTP status codes below 500 after which a retry can succeed."""


def _is_final(error: BaseException) -> bool:
    """Return whether a retry would fail in the same way: access denied, no credentials, or an invalid request."""
    status = _status(error)
    if 400 <= status < 500:
        return status not in PASSING
    final = (IsADirectoryError, NotADirectoryError, ValueError, TypeError, AttributeError)
    return _is_denied(error) or isinstance(error, (*final, NotImplementedError, ImportError))


def _is_unknown_host(error: BaseException | None) -> bool:
    """Return whether a host name was not resolved, an error that libraries wrap in their own errors."""
    for _ in range(10):  # a chain of errors may be cyclic
        if isinstance(error, socket.gaierror) or isinstance(getattr(error, "os_error", None), socket.gaierror):
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


def _is_denied(error: BaseException) -> bool:
    """Return whether the user has no access or no credentials."""
    name = type(error).__name__
    botocore = "Credential" in name or "Profile" in name or "Token" in name
    return botocore or isinstance(error, PermissionError) or _status(error) in (401, 403)


def _status(error: BaseException) -> int:
    """Return the HTTP status of any library's error; 0 if it has none."""
    named = ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code"))
    found = (getattr(holder, name, None) for holder, name in named)
    return next((status for status in found if isinstance(status, int)), 0)


def _asked_wait(error: BaseException) -> float:
    """Return the seconds to wait before the next try by the response's `Retry-After`, at most `LONGEST_WAIT`."""
    for each in (error, error.__cause__):  # s3fs wraps botocore's error, whose response is a dictionary
        answer = getattr(each, "response", None)
        metadata = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
        headers = (
            metadata.get("HTTPHeaders") or getattr(each, "headers", None) or getattr(answer, "headers", None) or {}
        )
        text = next((str(headers[name]) for name in headers if name.lower() == "retry-after"), "")
        if text.strip().isdigit():
            return min(float(text), LONGEST_WAIT)
    return 0.0


# ---- blocks ------------------------------------------------------------------------------------------------


class _InFlight:
    """The fetching threads of this process, and the blocks in flight."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(AT_ONCE, "kenotron-remote")
        self.lock = threading.Lock()
        self.blocks: dict[str, Future[bytes]] = {}


_in_flight = lru_cache(_InFlight)  # one per process
os.register_at_fork(after_in_child=_in_flight.cache_clear)  # a forked process has none of its parent's threads


def request_block(block: CachedBlock, missing: bool = False) -> Future[bytes] | None:
    """Start to fetch and cache `block`; return None if it is cached, which is not checked if `missing`.

    Concurrent requests for a block that is being fetched share one future.
    """
    name, state = block.name, _in_flight()
    with state.lock:
        # A fetched block is cached before it leaves `blocks`, so looking up in this order finds it in one of the two.
        if (future := state.blocks.get(name)) is not None:
            return future
        if not missing and block_store(block.file.settings).holds(name, block.stop - block.start):
            return None
        future = state.blocks[name] = state.pool.submit(_fetch, block)
    future.add_done_callback(lambda _: state.blocks.pop(name, None))
    return future


def read_block(block: CachedBlock, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of `block`, from its beginning; it is fetched if missing or damaged in the cache."""
    found = block_store(block.file.settings).read(block.name, block.stop - block.start, start, stop)
    if found is not None:
        return found
    try:
        future = request_block(block, missing=True)
        assert future is not None
        return future.result()[start:stop]
    except CancelledError:
        return _fetch(block)[start:stop]


def _fetch(block: CachedBlock) -> bytes:
    """Fetch and cache `block`. Raises as `fetch_range`."""
    try:
        data = fetch_range(block.file, block.start, block.stop)
    except FileNotFoundError:
        raise InputError(f"{block.file.url}: the file has vanished since it was opened") from None
    block_store(block.file.settings).keep(block.name, data)
    return data


# ---- without the cache -------------------------------------------------------------------------------------


def fetch_range(file: RemoteFile, start: int, stop: int) -> bytes:
    """Return bytes [start, stop) of this version of a file.

    Raises FileNotFoundError, and InputError if every try failed, or the file has changed.
    """
    fs, expected = filesystem(file.url), stop - start

    def read() -> bytes:
        data, found = read_range(fs, file.url, start, stop)
        if found != (file.size, file.version):
            raise InputError(f"{file.url}: the file has changed since it was opened")
        if len(data) == file.size > expected:
            raise InputError(
                f"{file.url}: its server ignores byte ranges and sends the complete file; download the file first"
            )
        if len(data) != expected:
            raise OSError(f"expected {expected} bytes, got {len(data)}")
        return data

    return with_retries(f"{file.url}, bytes {start}-{stop - 1}", file.settings.tries, read)


def stream(file: RemoteFile, size: int = BLOCK) -> Iterator[bytes]:
    """Yield a file in pieces of `size` bytes, some fetched ahead. Raises as `fetch_range`."""

    def fetch(start: int) -> Future[bytes]:
        return _in_flight().pool.submit(fetch_range, file, start, min(start + size, file.size))

    starts = iter(range(0, file.size, size))
    ahead = deque(map(fetch, islice(starts, AHEAD)))
    while ahead:
        yield ahead.popleft().result()
        ahead.extend(map(fetch, islice(starts, 1)))
