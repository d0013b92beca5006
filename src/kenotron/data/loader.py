"""Batches made ready ahead of the step that needs them.

    threads    make 5   make 6   make 7   ...
    step                train 5  train 6  ...      next() returns at once

Whatever a thread raises comes out of the `next` that would have returned its batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Iterator over ``make(step)`` for step in [start, stop), made ahead by `workers` threads (0: in the caller's).

    Use it in a `with`, or call `close`.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, workers: int) -> None:
        self._make, self._next, self._stop = make, start, stop
        self._ahead = workers + 1 if workers else 0
        self._pool = ThreadPoolExecutor(workers, "kenotron-loader") if workers else None
        self._ready: deque[Future[T]] = deque()
        self._fill()

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._pool is None:
            if self._next >= self._stop:
                raise StopIteration
            step, self._next = self._next, self._next + 1
            batch = self._make(step)
        else:
            if not self._ready:
                raise StopIteration
            batch = self._ready.popleft().result()
            self._fill()
        return batch

    def close(self) -> None:
        """Stop the threads; what was made ahead is dropped."""
        self._ready.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        while self._pool and self._next < self._stop and len(self._ready) < self._ahead:
            self._ready.append(self._pool.submit(self._make, self._next))
            self._next += 1
