"""Build a model's input batches from samples.

A *sample* is `sequence_length + 1` token ids. Its first `sequence_length` are the inputs, its last
`sequence_length` the labels. With `sequence_length = 4`, the stream 7 8 9 2 5 6 3 1 4 holds two samples:

    sample 0    7 8 9 2 5            inputs 7 8 9 2     labels 8 9 2 5
    sample 1            5 6 3 1 4    inputs 5 6 3 1     labels 6 3 1 4

Samples share one token, so every token but the first is a label exactly once: none is skipped.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]

NO_LOSS = -100
"""Label of a token without a loss (the value that torch's cross-entropy ignores)."""

PAD = -1
"""The token that pads held-out samples; its label is `NO_LOSS`."""


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch; see docs/architecture.md.

    `tokens`, `labels`, `positions`, `documents` are ``[sequences, sequence_length]`` int64, `sample_ids`
    ``[sequences]``. `positions` and `documents` are None if every sequence is one document. `sources`
    ``[sequences]`` has the index of each sequence's source in its stage, `weights` ``[sequences]`` fp32 of its loss.
    """

    tokens: Int64
    labels: Int64
    sample_ids: Int64
    positions: Int64 | None = None
    documents: Int64 | None = None
    sources: Int64 | None = None
    weights: NDArray[np.float32] | None = None

    def __getitem__(self, rows: slice | Int64) -> Self:
        """Return the sequences `rows`, in this order."""
        arrays: dict[str, Any] = vars(self)
        return replace(self, **{name: array[rows] for name, array in arrays.items() if array is not None})


def batch_places(total: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> Int64:
    """Return the indices ``[total / dp_size]`` in the global batch of `total` samples that a data-parallel rank reads.

    Sample j goes to micro-batch m, data-parallel rank r and row k, with
    ``j = (m * dp_size + r) * micro_batch_size + k``.
    """
    return np.arange(total, dtype=np.int64).reshape(-1, dp_size, micro_batch_size)[:, dp_rank].reshape(-1)


def make_batch(
    windows: NDArray[np.integer],
    sample_ids: Int64,
    documents: Int64 | None = None,
    loss_mask: NDArray[np.bool_] | None = None,
    sources: Int64 | None = None,
) -> TokenBatch:
    """Cut samples ``[n, sequence_length + 1]``, of `sources` ``[n]``, into inputs and labels.

    With `documents` (same shape), positions restart at every document, and a label that belongs to the
    next document is masked. Labels where `loss_mask` (same shape) is False are masked.
    """
    tokens = windows[:, :-1].astype(np.int64)
    labels = windows[:, 1:].astype(np.int64)
    if loss_mask is not None:
        labels[~loss_mask[:, 1:]] = NO_LOSS
    if documents is None:
        return TokenBatch(tokens, labels, sample_ids, sources=sources)
    begins = np.ones(documents.shape, dtype=np.bool_)
    np.not_equal(documents[:, 1:], documents[:, :-1], out=begins[:, 1:])
    labels[begins[:, 1:]] = NO_LOSS
    starts = np.flatnonzero(begins[:, :-1])  # of each sequence and document, from which positions count
    positions = np.arange(tokens.size) - np.repeat(starts, np.diff(np.concatenate((starts, [tokens.size]))))
    inner = documents[:, :-1]
    return TokenBatch(tokens, labels, sample_ids, positions.reshape(tokens.shape), inner - inner[:, :1], sources)
