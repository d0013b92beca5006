"""Arrays in files: memory-mapped local files, and many slices at once, also of remote files (`paths.RemoteArray`).

map_local_array(path, dtype, 0, count)   an array that is read when it is indexed
read_rows(arrays, starts, rows)          the slices of a whole batch are fetched in parallel
fetch_ahead(arrays, starts, lengths)     the same, without waiting
"""

import mmap
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kenotron.storage.paths import RemoteArray

SMALL_ARRAY = 4096
"""Bytes up to which an array is read instead of mapped, as the kernel allows only some 65,000 mappings a process."""

ROWS_AT_ONCE = 64
"""The number of rows that are fetched in parallel and held in memory."""

Array: TypeAlias = NDArray | RemoteArray


def read_rows(arrays: Sequence[Array], starts: Sequence[int], rows: NDArray) -> None:
    """Fill row i of `rows` ``[n, length]`` with the items of ``arrays[i]`` from ``starts[i]`` on."""
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
    """Start to fetch these slices. If a fetch fails, the read of the slice repeats it, and raises its error."""
    fetched = {}
    for array, start, length in zip(arrays, starts, lengths, strict=True):
        if isinstance(array, RemoteArray):
            fetched.update(array.fetch(start, start + length))
    return list(fetched.values())


def map_local_array(path: Path, dtype: np.dtype, offset: int, count: int) -> NDArray:
    """Memory-map `count` items of `dtype` at byte `offset` of a file, read-only; a small array is read instead.

    Raises OSError, and ValueError if the file is too short.
    """
    if count == 0:  # an empty range cannot be mapped
        return np.empty(0, dtype)
    if count * dtype.itemsize <= SMALL_ARRAY:
        found = np.fromfile(path, dtype, count, offset=offset)
        if len(found) < count:
            raise ValueError(f"{path}: ends before byte {offset + count * dtype.itemsize}")
        return found
    # A plain view: np.memmap's own slicing is several times slower.
    return np.asarray(np.memmap(path, dtype, "r", offset=offset, shape=(count,)))


def release(array: NDArray) -> None:
    """Drop the pages of a mapped array from this process's memory; the next read loads them again."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
