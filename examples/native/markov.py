"""A token source in C++, and its reference implementation in Python: the same samples."""

import ctypes
from pathlib import Path

import numpy as np

from kenotron.storage.native import load_library


class MarkovTokens:
    """Sample i is a walk on `vocab_size` tokens in steps of 1 to 4; `native` False: without a compiler."""

    def __init__(self, sequence_length: int, seed: int, vocab_size: int = 64, native: bool = True) -> None:
        self.length, self.seed, self.vocab_size = sequence_length + 1, seed, vocab_size
        self.fill = load_fill() if native else python_fill

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = np.empty(self.length, np.int64)
        self.fill(self.seed, index, self.vocab_size, tokens)
        return tokens


def load_fill():
    """`fill` of markov.cpp, compiled when it is first used."""
    fill = load_library(Path(__file__).with_name("markov.cpp")).fill
    fill.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    fill.restype = None
    return lambda seed, index, vocab_size, tokens: fill(seed, index, vocab_size, tokens.ctypes.data, len(tokens))


def python_fill(seed: int, index: int, vocab_size: int, tokens: np.ndarray) -> None:
    """What markov.cpp does."""
    state, token = (seed << 32) + index, 0
    for n in range(len(tokens)):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        token = (token + 1 + (state >> 62)) % vocab_size
        tokens[n] = token
