"""Reading from another machine: retries, and blocks that are fetched once however many threads ask.

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
from kenotron.config.remote import RemoteData
from kenotron.storage.blocks import block_store
from kenotron.storage.drivers import CREDENTIALS, FileInfo, filesystem, read_range
from kenotron.storage.hub import first_line

T = TypeVar("T")

BLOCK = 1 << 22
"""Bytes of a block where files are read from end to end, or fit in the cache."""

SPARSE_BLOCK = 1 << 16
"""Bytes of a block where samples are picked out of more than the cache holds."""

AT_ONCE = 32
"""Concurrent reads of one process."""

AHEAD = 8
"""Pieces of a stream that are fetched at the same time."""

FIRST_WAIT = 0.5
"""Seconds before the second try, doubled before every later one, each times a random number around 1."""

LONGEST_WAIT = 60.0
"""Longest wait in seconds that a server may request by `Retry-After`."""


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
        """Its name in the cache: a hash of URL, version and bytes."""
        text = f"{self.file.url}\n{self.file.version}\n{self.file.size}\n{self.start}-{self.stop}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---- retries -----------------------------------------------------------------------------------------------


def file_info(url: str, settings: RemoteData) -> FileInfo:
    """The driver's current `info` of a file or folder. Raises FileNotFoundError; InputError as in `with_retries`."""
    fs = filesystem(url)
    return with_retries(url, settings.tries, lambda: fs.info(url), opening=True)


def list_files(url: str, tries: int, doing: str = "read") -> dict[str, FileInfo]:
    """The driver's `info` of every file below a folder, by its name behind the folder's. Raises as `file_info`."""
    fs = filesystem(url)
    found = with_retries(url, tries, lambda: fs.find(url, detail=True), opening=True, doing=doing)
    root = fs._strip_protocol(url).rstrip("/") + "/"
    files = {name: info for name, info in found.items() if info["type"] == "file" and name.startswith(root)}
    return {name.removeprefix(root): info for name, info in files.items()}


def with_retries(what: str, tries: int, read: Callable[[], T], opening: bool = False, doing: str = "read") -> T:
    """``read()``, tried up to `tries` times with growing waits.

    Raises InputError: `what`, that it cannot be `doing` (a participle) and the driver's message, after the last try
    or at once if a retry cannot help. When `opening`, a host that is not known is such a case: the URL is mistyped, or
    this machine is offline.
    """
    for number in range(1, tries + 1):
        try:
            return read()
        except (FileNotFoundError, InputError):
            raise
        except Exception as error:  # drivers raise whatever their libraries do
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
    """Whether a retry would fail in the same way: not allowed, no credentials, no such request."""
    status = _status(error)
    if 400 <= status < 500:
        return status not in PASSING
    final = (IsADirectoryError, NotADirectoryError, ValueError, TypeError, AttributeError)
    return _is_denied(error) or isinstance(error, (*final, NotImplementedError, ImportError))


def _is_unknown_host(error: BaseException | None) -> bool:
    """Whether a name was not resolved, which libraries wrap in errors of their own."""
    for _ in range(10):  # a chain of errors may be a ring
        if isinstance(error, socket.gaierror) or isinstance(getattr(error, "os_error", None), socket.gaierror):
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


def _is_denied(error: BaseException) -> bool:
    """Whether the user may not read it, or has no credentials."""
    name = type(error).__name__
    botocore = "Credential" in name or "Profile" in name or "Token" in name
    return botocore or isinstance(error, PermissionError) or _status(error) in (401, 403)


def _status(error: BaseException) -> int:
    """The HTTP status of an error of some library; 0 if it has none."""
    named = ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code"))
    found = (getattr(holder, name, None) for holder, name in named)
    return next((status for status in found if isinstance(status, int)), 0)


def _asked_wait(error: BaseException) -> float:
    """Seconds to wait before the next try, by the answer's `Retry-After`; at most `LONGEST_WAIT`."""
    for each in (error, error.__cause__):  # s3fs raises its own from botocore's, whose answer is a dictionary
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
    """The fetching threads of this process, and the blocks that are being fetched."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(AT_ONCE, "kenotron-remote")
        self.lock = threading.Lock()
        self.blocks: dict[str, Future[bytes]] = {}


_in_flight = lru_cache(_InFlight)  # one a process
os.register_at_fork(after_in_child=_in_flight.cache_clear)  # a forked process has none of its parent's threads


def request_block(block: Block, missing: bool = False) -> Future[bytes] | None:
    """Start to fetch and keep `block`; None if it is in the cache, which `missing` rules out.

    Concurrent requests for a block that is being fetched share one future.
    """
    name, state = block.name, _in_flight()
    with state.lock:
        # A fetched block is kept before it leaves `blocks`, so it is found in one of the two, looked up in this order.
        if (future := state.blocks.get(name)) is not None:
            return future
        if not missing and block_store(block.file.settings).holds(name, block.stop - block.start):
            return None
        future = state.blocks[name] = state.pool.submit(_fetch, block)
    future.add_done_callback(lambda _: state.blocks.pop(name, None))
    return future


def read_block(block: Block, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of `block`, counted from its beginning; fetched if the cache has it not, or damaged."""
    found = block_store(block.file.settings).read(block.name, block.stop - block.start, start, stop)
    if found is not None:
        return found
    try:
        future = request_block(block, missing=True)
        assert future is not None
        return future.result()[start:stop]
    except CancelledError:
        return _fetch(block)[start:stop]


def _fetch(block: Block) -> bytes:
    """Fetch `block` and keep it. Raises as `fetch_range`."""
    try:
        data = fetch_range(block.file, block.start, block.stop)
    except FileNotFoundError:
        raise InputError(f"{block.file.url}: the file has vanished since it was opened") from None
    block_store(block.file.settings).keep(block.name, data)
    return data


# ---- without the cache -------------------------------------------------------------------------------------


def fetch_range(file: RemoteFile, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of this version of a file.

    Raises FileNotFoundError; InputError: every try failed, or the file is another one by now.
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
    """All of a file in order, in pieces of `size` bytes, some fetched ahead. Raises as `fetch_range`."""

    def fetch(start: int) -> Future[bytes]:
        return _in_flight().pool.submit(fetch_range, file, start, min(start + size, file.size))

    starts = iter(range(0, file.size, size))
    ahead = deque(map(fetch, islice(starts, AHEAD)))
    while ahead:
        yield ahead.popleft().result()
        ahead.extend(map(fetch, islice(starts, 1)))
