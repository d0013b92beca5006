"""Random numbers that are functions of their purpose, not of when they are computed.

A *key* identifies a stream (seed, parameter name, ...), a *counter* a number in it, and the hash of both is
the number. Number 1,000,000 of a stream is computed without the numbers before it:

    key = derive_key(42, "model.norm.weight")    # the same on every machine, process and Python version
    hash64(key, 0), hash64(key, 1_000_000)       # two independent 64-bit integers

It uses only Python integers and numpy, so that packages without torch can use it; `kernels.random` computes the
same bits on tensors.

The hash is splitmix64's finalizer (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
with Stafford's variant 13 of the constants) over ``key + counter * golden``. The key enters a second time
halfway, so that two streams whose states happen to coincide still produce different numbers.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: counters spread over all 64 bits
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
ZERO = np.uint64(0)


def derive_key(*parts: int | str) -> int:
    """Return a 64-bit key (0 <= key < 2**64) from integers and strings; their order, types and borders all matter.

    ``derive_key(1, "2")``, ``derive_key("1", 2)`` and ``derive_key("12")`` are three different keys.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, (int, str)):
            raise TypeError(f"a key is derived from int and str parts, not {type(part).__name__}: {part!r}")
        text = str(part).encode()
        kind = b"s" if isinstance(part, str) else b"i"
        digest.update(kind + len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")


def hash64(key: int, counter: int) -> int:
    """Return number `counter` of stream `key`, an integer uniform in [0, 2**64); both are taken modulo 2**64."""
    z = (counter * GOLDEN + key) & MASK
    z = (((z ^ (z >> 30)) * MULTIPLIER_1) + key) & MASK
    z = ((z ^ (z >> 27)) * MULTIPLIER_2) & MASK
    return z ^ (z >> 31)


def mix64(x: NDArray[np.uint64], key: np.uint64 = ZERO) -> NDArray[np.uint64]:
    """Apply SplitMix64's finalizer, a bijection of 64 bits in which every bit affects all; `key` enters halfway."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    x = x + key if key else x
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return np.asarray(x ^ (x >> np.uint64(31)))


def hash64_array(key: int, counters: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return `hash64` of every counter of an integer array (any shape) as uint64, with the same bits."""
    offset = np.uint64(key & MASK)
    return mix64(np.asarray(counters).astype(np.uint64) * np.uint64(GOLDEN) + offset, offset)


def uniform_array(key: int, counters: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return floats in [0, 1) with 53 random bits, one for each counter."""
    return (hash64_array(key, counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53
