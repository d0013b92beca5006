"""Many slices of arrays at once, some of which may be in remote files (`paths.RemoteArray`).

read_rows(arrays, starts, rows)          the parts of a whole batch are fetched in parallel
fetch_ahead(arrays, starts, lengths)     the same, without waiting
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

from numpy.typing import NDArray

from kenotron.storage.paths import RemoteArray

ROWS_AT_ONCE = 64
"""Rows whose parts are fetched in parallel, and held in memory."""

Array: TypeAlias = NDArray | RemoteArray


def read_rows(arrays: Sequence[Array], starts: Sequence[int], rows: NDArray) -> None:
    """Fill `rows` ``[n, length]``: row i with the items of ``arrays[i]`` from ``starts[i]`` on."""
    length = rows.shape[1]
    remote: list[tuple[int, RemoteArray, int]] = []
    for number, (array, start) in enumerate(zip(arrays, starts, strict=True)):
        if isinstance(array, RemoteArray):
            remote.append((number, array, int(start)))
        else:
            rows[number] = array[start : start + length]
    for first in range(0, len(remote), ROWS_AT_ONCE):
        some = remote[first : first + ROWS_AT_ONCE]
        fetched = {}
        for _, array, start in some:
            fetched.update(array.fetch(start, start + length))
        for number, array, start in some:
            rows[number] = array.read(start, start + length, fetched)


def fetch_ahead(arrays: Sequence[Array], starts: Sequence[int], lengths: Sequence[int]) -> list[Future[bytes]]:
    """Start to fetch these slices. A fetch that fails is repeated, and its error raised, by the read of the slice."""
    fetched = {}
    for array, start, length in zip(arrays, starts, lengths, strict=True):
        if isinstance(array, RemoteArray):
            fetched.update(array.fetch(start, start + length))
    return list(fetched.values())
