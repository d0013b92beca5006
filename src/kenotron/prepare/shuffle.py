"""Shuffling documents that do not fit in memory: two passes over the disk.

    pass 1    each document goes to a random bucket               d0 d1 d2 d3 d4 → [d1 d4] [d0 d2 d3]
    pass 2    each bucket is permuted and written                              → d4 d1  d2 d0 d3

Every order of the documents is equally likely (up to the generator), since each bucket holds a random subset and each
bucket's order is a random permutation. Memory holds a bucket's document ends, a few million tokens, and
of documents that come in chunks one; buckets are memory-mapped files.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kenotron.data.formats.datatrove import TOKENS_AT_ONCE
from kenotron.storage.arrays import map_local_array, release

BUCKET_TOKENS = 1 << 24
MOST_BUCKETS = 256

KEPT = 1 << 28
"""Bytes up to which a bucket stays in memory while it is written."""

Loss = NDArray[np.bool_] | None


Documents = tuple[NDArray[np.integer], NDArray[np.int64], Loss]
"""Documents end to end ``[tokens]``, the tokens of each ``[documents]``, and whether each token carries a loss."""


class DocumentShuffle:
    """Takes documents in any number, and returns them in an order that `seed` alone decides.

    `tokens` is about how many will come. Files lie in `folder`, which is made, and is removed at the end.
    """

    def __init__(self, folder: Path, dtype: np.dtype, tokens: int, seed: list[int], with_loss: bool = False) -> None:
        self.folder, self.dtype, self.with_loss = folder, dtype, with_loss
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.buckets = min(1 + tokens // BUCKET_TOKENS, MOST_BUCKETS)
        self._waiting: list[NDArray[np.integer]] = []  # of a document that goes on
        folder.mkdir(parents=True)
        kinds = ("tokens", "lengths", *(("loss",) if with_loss else ()))
        self.files = [
            {kind: open(folder / f"{b}.{kind}", "wb") for kind in kinds}  # noqa: SIM115 (see __exit__)
            for b in range(self.buckets)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for files in self.files:
            for file in files.values():
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def append(self, ids: NDArray[np.integer], ends: NDArray[np.integer]) -> None:
        """Append a chunk that may begin and end within a document; `ends` counts from the chunk's first token."""
        whole = int(ends[-1]) if len(ends) else 0
        if len(ends):
            held = sum(map(len, self._waiting))
            self.write(np.concatenate([*self._waiting, ids[:whole]]), np.diff(ends, prepend=-held))
            self._waiting = []
        if whole < len(ids):
            self._waiting.append(ids[whole:].astype(self.dtype))  # the narrower type, and not a view of all of `ids`

    def write(self, ids: NDArray[np.integer], lengths: NDArray[np.int64], loss: Loss = None) -> None:
        """Return documents end to end ``[tokens]``, the tokens of each ``[documents]``."""
        for some in some_documents(ids, lengths, loss):
            self._write(*some)

    def _write(self, ids: NDArray[np.integer], lengths: NDArray[np.int64], loss: Loss) -> None:
        bucket_of = self.random.integers(self.buckets, size=len(lengths))
        if len(lengths) == 1:  # which may be longer than memory holds indices of
            self._put(int(bucket_of[0]), ids, lengths, loss)
            return
        order = np.argsort(bucket_of, kind="stable")
        places = _spans((np.cumsum(lengths) - lengths)[order], lengths[order])
        bounds = np.searchsorted(bucket_of[order], np.arange(self.buckets + 1))
        token_bounds = np.concatenate([[0], np.cumsum(lengths[order])])[bounds]
        for bucket in range(self.buckets):
            mine = order[bounds[bucket] : bounds[bucket + 1]]
            taken = places[token_bounds[bucket] : token_bounds[bucket + 1]]
            self._put(bucket, ids[taken], lengths[mine], None if loss is None else loss[taken])

    def _put(self, bucket: int, ids: NDArray[np.integer], lengths: NDArray[np.int64], loss: Loss) -> None:
        files = self.files[bucket]
        for start in range(0, len(ids), TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            files["tokens"].write(ids[part].astype(self.dtype).tobytes())
            if self.with_loss:
                files["loss"].write((np.ones(len(ids[part]), bool) if loss is None else loss[part]).tobytes())
            release(ids)
        files["lengths"].write(lengths.astype("<i8").tobytes())

    def documents(self) -> Iterator[Documents]:
        """Yield all documents, in their new order."""
        for bucket, files in enumerate(self.files):
            for file in files.values():
                file.close()
            lengths = np.fromfile(self.folder / f"{bucket}.lengths", "<i8")
            ids = _map(self.folder / f"{bucket}.tokens", self.dtype)
            loss = _map(self.folder / f"{bucket}.loss", np.dtype(bool)) if self.with_loss else None
            order = self.random.permutation(len(lengths))
            starts = np.cumsum(lengths) - lengths
            for first, last in _runs(lengths[order]):
                chosen = order[first:last]
                if len(chosen) == 1:  # which may be longer than memory holds indices of
                    places: slice | NDArray[np.int64] = slice(starts[chosen[0]], starts[chosen[0]] + lengths[chosen[0]])
                else:
                    places = _spans(starts[chosen], lengths[chosen])
                yield ids[places], lengths[chosen], None if loss is None else loss[places]
                if ids.nbytes > KEPT:  # its pages would be read again for every run of documents
                    release(ids)


def some_documents(ids: NDArray[np.integer], lengths: NDArray[np.int64], loss: Loss) -> Iterator[Documents]:
    """Yield documents end to end, about a million tokens at a time."""
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    for first, last in _runs(lengths):
        part = slice(bounds[first], bounds[last])
        yield np.asarray(ids[part]), lengths[first:last], None if loss is None else np.asarray(loss[part])


def _runs(lengths: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield runs of documents of about `TOKENS_AT_ONCE` tokens, at least one document each."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = ends[first] - lengths[first]
        last = max(int(np.searchsorted(ends, before + TOKENS_AT_ONCE, side="right")), first + 1)
        yield first, last
        first = last


def _spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``starts[0], starts[0] + 1, …`` for each span, end to end."""
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


def _map(file: Path, dtype: np.dtype) -> NDArray:
    return map_local_array(file, dtype, 0, file.stat().st_size // dtype.itemsize)
