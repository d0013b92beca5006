"""Numbers of a remote file, read as an array is: by slices, from any thread.

tokens[8000:8100]            the block that holds them is fetched, kept, and read from the disk next time
read_rows(arrays, starts, rows)      the blocks of a whole batch are fetched side by side
fetch_ahead(arrays, starts, lengths) the same, not waited for
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .blocks import block_store
from .fetching import AT_ONCE, Block, RemoteFile, ask, read_block
from .paths import BLOCK, RemotePath


class RemoteArray:
    """`count` items of `dtype` from byte `offset` of a remote file on: length, slices of step 1, single items."""

    def __init__(self, path: RemotePath, dtype: np.dtype, offset: int, count: int) -> None:
        self.file, self.dtype = path.file(), dtype
        self._offset, self._count, self._block = offset, count, path.block_size

    def __len__(self) -> int:
        return self._count

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self._count * self.itemsize

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            at = range(self._count)[key]  # negative ones, and IndexError
            return self._read(at, at + 1)[0]
        start, stop, step = key.indices(self._count)
        if step != 1:
            raise IndexError("a remote array is sliced with step 1")
        return self._read(start, max(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:], dtype=dtype)

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks that items [start, stop) lie in. They count from byte 0, and the last one ends with the file."""
        first, end = self._offset + start * self.itemsize, self._offset + stop * self.itemsize
        for at in range(first // self._block * self._block, end, self._block):
            yield Block(self.file, at, min(at + self._block, self.file.size))

    def copy(self, start: int, stop: int, fetched: dict[Block, Future[bytes]]) -> NDArray[Any]:
        """Items [start, stop), from `fetched` where they are there."""
        first, end = self._offset + start * self.itemsize, self._offset + stop * self.itemsize
        parts = []
        for block in self.blocks(start, stop):
            low, high = max(first, block.start) - block.start, min(end, block.stop) - block.start
            data = _result(fetched.get(block))
            parts.append(read_block(block, low, high) if data is None else data[low:high])
        return np.frombuffer(b"".join(parts), self.dtype)

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        if start == stop:
            return np.empty(0, self.dtype)
        return self.copy(start, stop, _ask_all(self.blocks(start, stop)))


def whole_array(path: RemotePath, dtype: np.dtype, offset: int, count: int) -> NDArray[Any]:
    """The same of a file that is brought here as a whole and mapped: an index, which is searched at random."""
    file = path.file()

    def fill(target: BinaryIO) -> None:
        for data in read_through(file):
            target.write(data)

    name = Block(file, 0, file.size).name
    data = block_store(file.settings).whole(name, file.size, fill, file.url)
    return np.frombuffer(data, dtype, count, offset)


def read_through(file: RemoteFile) -> Iterator[bytes]:
    """All of a file, block by block, the next ones on their way."""
    blocks = [Block(file, at, min(at + BLOCK, file.size)) for at in range(0, file.size, BLOCK)]
    for first in range(0, len(blocks), 8):
        fetched = _ask_all(blocks[first : first + 8])
        for block in blocks[first : first + 8]:
            data = _result(fetched.get(block))
            yield read_block(block, 0, block.stop - block.start) if data is None else data


# ---- batches -----------------------------------------------------------------------------------------------

Array = NDArray[Any] | RemoteArray


def read_rows(arrays: Sequence[Array], starts: Sequence[int], rows: NDArray[Any]) -> None:
    """Fill `rows` ``[n, length]``: row i with the items of ``arrays[i]`` from ``starts[i]`` on.

    The blocks of 2 x `AT_ONCE` rows are fetched side by side: no more are held in memory.
    """
    length = rows.shape[1]
    remote = []
    for number, (array, start) in enumerate(zip(arrays, starts, strict=True)):
        if isinstance(array, RemoteArray):
            remote.append((number, array, int(start)))
        else:
            rows[number] = array[start : start + length]
    for first in range(0, len(remote), 2 * AT_ONCE):
        part = remote[first : first + 2 * AT_ONCE]
        fetched = _ask_all(block for _, array, start in part for block in array.blocks(start, start + length))
        for number, array, start in part:
            rows[number] = array.copy(start, start + length, fetched)


def fetch_ahead(arrays: Sequence[Any], starts: Sequence[int], lengths: Sequence[int]) -> list[Future[bytes]]:
    """Have the blocks of these slices fetched; a read that fails is met again by who reads the slice."""
    wanted = (
        block
        for array, start, length in zip(arrays, starts, lengths, strict=True)
        if isinstance(array, RemoteArray)
        for block in array.blocks(start, start + length)
    )
    return list(_ask_all(wanted).values())


def _ask_all(blocks: Any) -> dict[Block, Future[bytes]]:
    asked = {block: ask(block) for block in dict.fromkeys(blocks)}
    return {block: future for block, future in asked.items() if future is not None}


def _result(future: Future[bytes] | None) -> bytes | None:
    """The block; None where nobody fetches it (any more)."""
    if future is None:
        return None
    try:
        return future.result()
    except CancelledError:
        return None
