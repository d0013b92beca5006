"""Document numbers of windows, and the windows of held-out documents. Nine tokens with windows of 4:

tokens    7 8 9 2 5 6 3 1 4      ends of documents  4 9
sample 0  7 8 9 2 5              documents  0 0 0 0 1
sample 1          5 6 3 1 4      documents  1 1 1 1 1
"""

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.batch import PAD, Int64
from kenotron.data.cache import SplitTokens
from kenotron.data.source import Samples, TokenSource


class HeldOutWindows(TokenSource):
    """Windows over all tokens of one split of the cache; the last window is padded with -1."""

    def __init__(self, name: str, split: SplitTokens, sequence_length: int) -> None:
        self.name, self.split, self.sequence_length = name, split, sequence_length
        self.bytes_per_token = split.bytes / len(split.tokens) if len(split.tokens) else None

    def __len__(self) -> int:
        return max(0, -(-(len(self.split.tokens) - 1) // self.sequence_length))

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the windows `indices` ``[n]``; the last one is padded."""
        starts, size = indices * self.sequence_length, self.sequence_length + 1
        rows = np.full((len(indices), size), PAD, dtype=np.int64)
        mask = None if self.split.loss is None else np.zeros(rows.shape, dtype=np.bool_)
        for row, start in enumerate(starts):
            window = self.split.tokens[start : start + size]
            rows[row, : len(window)] = window
            if mask is not None and self.split.loss is not None:
                mask[row, : len(window)] = self.split.loss[start : start + size]
        documents = None
        if document_ids:
            places = (starts[:, None] + np.arange(size)).astype(np.uint64)
            documents = np.searchsorted(self.split.ends, places, side="right").astype(np.int64)
        return Samples(rows, documents, mask)

    def at_borders(self, indices: Int64) -> NDArray[np.bool_]:
        """Return whether each token ``[n, S + 1]`` of the windows is the first or last token of its document."""
        places = (indices[:, None] * self.sequence_length + np.arange(self.sequence_length + 2)).astype(np.uint64)
        ends = self.split.ends
        begins = np.searchsorted(ends, places, side="right") > np.searchsorted(ends, places, side="left")
        return begins[:, :-1] | begins[:, 1:]


def document_numbers(ends: NDArray[np.uint64], starts: Int64, size: int, name: str) -> Int64:
    """Return the document number of every token ``[n, size]`` of the windows that begin at `starts` ``[n]``.

    `ends` ``[documents]`` are the exclusive ends of the documents. Raises InputError, with `name`, if they are not
    sorted.
    """
    # Documents first[i] <= d < last[i] end inside window i; each end raises the number of all following tokens by one.
    first, last = np.searchsorted(ends, np.array((starts, starts + size - 1), dtype=np.uint64), side="right")
    inside = np.maximum(last - first, 0)
    row = np.repeat(np.arange(len(starts)), inside)
    document = np.arange(inside.sum()) + np.repeat(first - np.cumsum(inside) + inside, inside)
    place = ends[document].astype(np.int64) - starts[row]
    if ((place <= 0) | (place >= size)).any():
        raise InputError(f"{name}: the ends of its documents are not in order (near document {int(first.min())})")
    numbers = np.bincount(row * size + place, minlength=len(starts) * size).reshape(len(starts), size)
    numbers[:, 0] = first
    return np.cumsum(numbers, axis=1, out=numbers)
