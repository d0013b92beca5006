"""`dataset: null` is an endless source of uniformly random tokens, hashes of (seed, sample, position)."""

import numpy as np

from kenotron.data.batch import Int64
from kenotron.data.source import Opening, SampleRange, Samples, SourceSpec, TokenSource
from kenotron.kernels.hashing import derive_key, mix64

HELD_OUT = 1024
"""The number of validation samples."""


class RandomTokens(TokenSource):
    """Samples ``[sequence_length + 1]`` of ids below `vocab_size`."""

    name = "random tokens"

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, length: int = 1 << 48) -> None:
        self.vocab_size, self.length = vocab_size, length
        self._key = np.uint64(derive_key("random tokens", seed))
        self._columns = np.arange(sequence_length + 1, dtype=np.uint64)

    def __len__(self) -> int:
        return self.length

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the samples `indices` ``[n]``."""
        rows = mix64(indices.astype(np.uint64) ^ self._key)
        bits = mix64(rows[:, None] + self._columns) >> np.uint64(32)
        return Samples(((bits * np.uint64(self.vocab_size)) >> np.uint64(32)).astype(np.int64))


class RandomSpec(SourceSpec):
    """The source of random tokens, which has no settings."""

    title = "random"

    def identity(self) -> dict[str, object]:
        """Return the identity, the same for all random tokens."""
        return {}

    def open(self, opening: Opening) -> TokenSource:
        """Return random tokens below the model's vocabulary size."""
        tokens = RandomTokens(opening.run.vocab_size, opening.sequence_length, opening.seed)
        return SampleRange.without_last(tokens, HELD_OUT)


def specs(section: None) -> list[tuple[float | str, SourceSpec]]:
    """Return the single source of `dataset: null`."""
    return [(1.0, RandomSpec())]
