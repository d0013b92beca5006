"""Batches of held-out documents, with the number of bytes of their text.

A document is held out if the hash of its text is below `tokens.val_fraction` (text/hash_split.py). This is a property
of the document, so it is the same in every run and on every layout, whether the run validates or not. Its tokens are
read in windows as in training, in order, and the last window of a source is padded with labels of -100. So every
held-out token but the first of each source is a label once, and

    bits per byte = sum of losses / ln 2 / bytes

is exact for byte-level tokenizers, whose tokens have known bytes (end-of-document tokens have none; the same token
inside of a document has the bytes of its name). For other tokenizers, bytes are the source's bytes per token times the
number of labels, which is exact over the whole set.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kenotron.data.batch import NO_LOSS, PAD, Int64, TokenBatch, make_batch
from kenotron.data.order import huffman, interleave
from kenotron.data.source import TokenSource


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples of several sources, with their `labels`.

    `token_bytes` ``[vocab]`` has the bytes of every token if they are known, `bytes_per_token` the mean of each source;
    they are None and 0 if one of the sources has no text. `eos` has no bytes where it ends a document.
    """

    sources: list[TokenSource]
    labels: list[str]
    sequence_length: int
    token_bytes: Int64 | None
    bytes_per_token: list[float]
    document_masking: bool
    eos: int

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def batches(
        self, limit: int | None, micro_batch_size: int, dp_rank: int, dp_size: int
    ) -> Iterator[tuple[TokenBatch, float, int]]:
        """Yield this rank's micro-batches of `limit` samples (None: all), evenly spread over the set, by source.

        Each comes with the number of UTF-8 bytes of its labels (0.0: unknown), and its source's index. Every rank gets
        the same number of batches of the same shape; missing samples are padded with labels of -100.
        """
        total = len(self)
        count = total if limit is None else min(limit, total)
        chosen = np.arange(count, dtype=np.int64) * total // max(count, 1)
        source_of, index = interleave(huffman([len(source) for source in self.sources]), chosen)
        rows = dp_size * micro_batch_size
        for number in range(len(self.sources)):
            places = np.flatnonzero(source_of == number)
            for first in range(0, len(places), rows):
                start = first + dp_rank * micro_batch_size
                here = places[start : start + micro_batch_size]
                yield *self._batch(number, chosen[here], index[here], micro_batch_size), number

    def _batch(self, number: int, positions: Int64, index: Int64, rows: int) -> tuple[TokenBatch, float]:
        source, used = self.sources[number], len(index)
        windows = np.full((rows, self.sequence_length + 1), PAD, dtype=np.int64)
        documents = np.zeros_like(windows)
        loss_mask = np.ones(windows.shape, dtype=np.bool_)
        if used:
            read = source.read(index, self.document_masking)
            windows[:used] = read.tokens
            if self.document_masking and read.document_ids is not None:
                documents[:used] = read.document_ids
            if read.loss_mask is not None:
                loss_mask[:used] = read.loss_mask
        ids = np.full(rows, PAD, dtype=np.int64)
        ids[: len(positions)] = positions
        batch = make_batch(windows, ids, documents if self.document_masking else None, loss_mask)
        batch.labels[windows[:, 1:] == PAD] = NO_LOSS
        np.maximum(batch.tokens, 0, out=batch.tokens)
        real = batch.labels != NO_LOSS
        if self.token_bytes is None:
            return batch, float(real.sum()) * self.bytes_per_token[number]
        added = batch.labels == self.eos
        if used and (at_borders := source.at_borders(index)) is not None:
            added[:used] &= at_borders[:, 1:]
        return batch, float(self.token_bytes[batch.labels[real & ~added]].sum())
