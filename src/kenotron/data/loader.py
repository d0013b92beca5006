"""Prepare batches ahead of the step that needs them.

    threads    make 5   make 6   make 7   ...
    step                train 5  train 6  ...      next() returns at once

An exception in a thread is raised by the `next` that would have returned its batch. The threads are daemons: a read
that hangs must not keep a process that was asked to stop from saving or ending.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, Self, TypeVar

T = TypeVar("T")
THREADS = "kenotron-loader"
LEAVE_WITHIN_S = 5.0  # how long `close` waits for reads in progress


class Prefetcher(Generic[T]):
    """Iterates over ``make(step)`` for step in [start, stop), made ahead by `workers` threads (0: by the caller).

    Use it in a `with`, or call `close`.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, workers: int) -> None:
        self._make, self._next, self._stop = make, start, stop
        self._ahead = workers + 1 if workers else 0
        self._ready: deque[Future[T]] = deque()
        self._orders: SimpleQueue[tuple[Future[T], int] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{THREADS}_{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()
        self._fill()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._threads and self._next < self._stop:
            self._next += 1
            return self._make(self._next - 1)
        if not self._ready:
            raise StopIteration
        batch = self._ready.popleft().result()
        self._fill()
        return batch

    def close(self) -> None:
        """Stop the threads and drop the prepared batches."""
        for future in self._ready:
            future.cancel()
        self._ready.clear()
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join(LEAVE_WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        while self._threads and self._next < self._stop and len(self._ready) < self._ahead:
            future: Future[T] = Future()
            self._ready.append(future)
            self._orders.put((future, self._next))
            self._next += 1

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            future, step = order
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._make(step))
            except BaseException as error:
                future.set_exception(error)
