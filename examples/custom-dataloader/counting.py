"""A token source of your own: any object with `__len__` and `__getitem__`.

Sample i counts up from a random number in steps of 1 to 3, so that there is something to learn:

    41 43 45 47 49 …          31 32 33 34 35 …

Every sample must be a function of its index alone: Kénotron shuffles, mixes, splits and resumes by index.
"""

import numpy as np


class CountingTokens:
    """`samples` sequences of ``sequence_length + 1`` token ids below `vocab_size`."""

    def __init__(self, sequence_length: int, seed: int, vocab_size: int = 128, samples: int = 10_000) -> None:
        self.length, self.seed, self.vocab_size, self.samples = sequence_length + 1, seed, vocab_size, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> np.ndarray:
        random = np.random.default_rng([self.seed, index])
        start, step = random.integers(self.vocab_size), random.integers(1, 4)
        return (start + step * np.arange(self.length)) % self.vocab_size
