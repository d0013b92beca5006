"""The order of the data is arithmetic: sample i of a stage is computed, never stored.

Two pure functions compose. *Interleave* says which source sample i comes from and how many samples that source
gave before; *permute* says which of its samples the n-th draw is:

    i ──interleave──▶ (source, n) ──▶ epoch n // length ──permute──▶ index within the source

Both take arrays and cost the same at sample 0 and at sample 10^12.

**Interleave.** Two sources with weights 3 and 1: of the first n samples, round(n * 3/4) belong to the left one:

    n                0 1 2 3 4 5 6 7 8
    round(n * 3/4)   0 1 2 2 3 4 5 5 6      sample n is left's where the count grows: L L R L L L R L

More sources are a tree of such splits. Every split errs by at most 1/2, and an error made at a node of weight W
reaches a leaf of weight w scaled by w / W, so a leaf is off by at most 1/2 * sum(w / W) over its path
without the root. In a *Huffman* tree (always join the two lightest) a node's sibling is never lighter than
either of the node's children, hence grandparent >= parent + child: up any path weights grow at least like the Fibonacci
numbers, and the sum stays below that of their reciprocals, 1 + 1 + 1/2 + 1/3 + 1/5 + ... = 3.36. So after *every*
prefix of i samples, for any number of sources and any weights,

    | samples from source s  -  w_s * i |  <=  1.68

**Permute.** A keyed bijection of [0, length): a Feistel network (Luby and Rackoff 1988) on the fewest bits that hold
`length`, applied again while the image falls outside ("cycle walking", Black and Rogaway 2002). Another epoch is
another key. No sample of a source comes twice before all came once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import count

import numpy as np
from numpy.typing import NDArray

from .batch import Int64

UInt64 = NDArray[np.uint64]

BLOCK = 4096
"""Samples whose places are computed at once; a matter of speed only."""

ROUNDS = 6
_LOW32 = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUND_KEYS = [np.uint64(int(_GOLDEN) * (number + 1) % 2**64) for number in range(ROUNDS)]


def mix64(x: UInt64) -> UInt64:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): a bijection of 64 bits in which every bit moves every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ---- permute -----------------------------------------------------------------------------------------------


def permute(index: Int64, length: int, keys: UInt64, inverse: bool = False) -> Int64:
    """The image of every `index` ``[n]`` under the bijection of [0, length) that its key ``[n]`` names, or (`inverse`)
    what has it as its image.
    """
    x = index.astype(np.uint64)
    bits = max(2, (length - 1).bit_length())
    size = np.uint64(length)
    rounds = range(ROUNDS)[::-1] if inverse else range(ROUNDS)
    x = _feistel(x, keys, bits, rounds)
    outside = np.flatnonzero(x >= size)
    while outside.size:
        x[outside] = _feistel(x[outside], keys[outside], bits, rounds)
        outside = outside[x[outside] >= size]
    return x.astype(np.int64)


def _feistel(x: UInt64, keys: UInt64, bits: int, rounds: range) -> UInt64:
    """A bijection of [0, 2^bits): each half in turn is xor-ed with a hash of the other. A round undoes itself."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = x >> low_bits, x & low_mask
    for number in rounds:
        key = keys + _ROUND_KEYS[number]
        if number % 2 == 0:
            high = high ^ (mix64(low ^ key) & high_mask)
        else:
            low = low ^ (mix64(high ^ key) & low_mask)
    return (high << low_bits) | low


# ---- interleave --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A node: of the first n samples that reach it, ``round(n * ratio / 2^64)`` go left, the others right."""

    ratio: int
    left: Split | int
    right: Split | int


def huffman(weights: Sequence[float]) -> Split | int:
    """The tree of splits for positive `weights`, one leaf (the source's number) for each."""
    heap: list[tuple[Fraction, int, Split | int]] = [(Fraction(w), s, s) for s, w in enumerate(weights)]
    heapq.heapify(heap)
    for number in range(len(weights), 2 * len(weights) - 1):
        (light, _, right), (heavy, _, left) = heapq.heappop(heap), heapq.heappop(heap)
        ratio = min(int(heavy * 2**64 / (light + heavy)), 2**64 - 1)
        heapq.heappush(heap, (light + heavy, number, Split(ratio, left, right)))
    return heap[0][2]


def left_count(n: UInt64, ratio: int) -> UInt64:
    """``round(n * ratio / 2^64)``, exact for n < 2^63 (64 x 64 → 128 bit product by halves)."""
    r_low, r_high = np.uint64(ratio & 0xFFFFFFFF), np.uint64(ratio >> 32)
    n_low, n_high = n & _LOW32, n >> np.uint64(32)
    low = n_low * r_low
    middle = n_low * r_high + (low >> np.uint64(32))
    other = n_high * r_low + (middle & _LOW32)
    high = n_high * r_high + (middle >> np.uint64(32)) + (other >> np.uint64(32))
    return high + ((other >> np.uint64(31)) & np.uint64(1))


def interleave(tree: Split | int, positions: Int64) -> tuple[Int64, Int64]:
    """For every position ``[n]``: the source it belongs to, and how many of that source came before it."""
    source = np.empty(len(positions), dtype=np.int64)
    draw = np.empty(len(positions), dtype=np.int64)
    stack = [(tree, np.arange(len(positions)), positions.astype(np.uint64))]
    while stack:
        node, where, n = stack.pop()
        if isinstance(node, int):
            source[where], draw[where] = node, n.astype(np.int64)
            continue
        before = left_count(n, node.ratio)
        goes_left = left_count(n + np.uint64(1), node.ratio) > before
        stack.append((node.left, where[goes_left], before[goes_left]))
        stack.append((node.right, where[~goes_left], (n - before)[~goes_left]))
    return source, draw


def counts(tree: Split | int, n: int) -> dict[int, int]:
    """How many of the first n samples each source gives."""
    if isinstance(tree, int):
        return {tree: n}
    left = int(left_count(np.array([n], dtype=np.uint64), tree.ratio)[0])
    return counts(tree.left, left) | counts(tree.right, n - left)


def position_of(tree: Split | int, source: int, draw: int) -> int | None:
    """The sample that is the `draw`-th (from 0) of `source`: what `interleave` sends there; None if there is no source.

    Left's n-th (from 0) is the sample before the smallest m with ``round(m * ratio / 2^64) = n + 1``.
    """
    if isinstance(tree, int):
        return draw if tree == source else None
    if (n := position_of(tree.left, source, draw)) is not None:
        return -(-((2 * n + 1) << 63) // tree.ratio) - 1
    if (n := position_of(tree.right, source, draw)) is not None:
        return ((2 * n + 1) << 63) // (2**64 - tree.ratio)
    return None


# ---- both --------------------------------------------------------------------------------------------------


class Order:
    """Where sample i of one stage lies: ``locate(positions) -> (source, index within the source)``.

    `lengths`, `weights`, `keys` and `offsets` have one entry a source; an offset is the number of samples
    that earlier stages have drawn from it, so that a source goes on where it stopped. A length of None is a stream's:
    its index is the number of the draw.
    """

    def __init__(
        self,
        lengths: Sequence[int | None],
        weights: Sequence[float],
        keys: Sequence[int],
        offsets: Sequence[int] | None = None,
    ) -> None:
        self.lengths, self.keys = list(lengths), list(keys)
        self.offsets = list(offsets or [0] * len(self.lengths))
        self.tree = huffman(weights)
        self._block = lru_cache(maxsize=8)(self._compute_block)

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Source numbers ``[n]`` and indices ``[n]`` of the samples at `positions` ``[n]``."""
        source = np.empty(len(positions), dtype=np.int64)
        index = np.empty(len(positions), dtype=np.int64)
        block_of = positions // BLOCK
        for block in np.unique(block_of):
            where = np.flatnonzero(block_of == block)
            inside = positions[where] - block * BLOCK
            sources, indices = self._block(int(block))
            source[where], index[where] = sources[inside], indices[inside]
        return source, index

    def _compute_block(self, block: int) -> tuple[Int64, Int64]:
        positions = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int64)
        source, draw = interleave(self.tree, positions)
        index = np.empty_like(draw)
        for s in np.unique(source):
            where = np.flatnonzero(source == s)
            length = self.lengths[s]
            if length is None:
                index[where] = draw[where] + self.offsets[s]
                continue
            epoch, rest = np.divmod(draw[where] + self.offsets[s], length)
            index[where] = permute(rest, length, self._epoch_keys(s, epoch))
        return source, index

    def _epoch_keys(self, source: int, epoch: Int64) -> UInt64:
        return mix64(np.uint64(self.keys[source]) ^ mix64(epoch.astype(np.uint64) + _GOLDEN))

    def find(self, source: int, index: int, stop: int) -> Iterator[int]:
        """The positions in [0, stop), ascending, at which `locate` gives this `index` of this `source`."""
        length, offset = self.lengths[source], self.offsets[source]
        assert length is not None, "a stream is not read backwards"
        for epoch in count(offset // length):
            keys = self._epoch_keys(source, np.array([epoch], dtype=np.int64))
            draw = epoch * length + int(permute(np.array([index]), length, keys, inverse=True)[0]) - offset
            if draw < 0:  # an earlier stage's
                continue
            position = position_of(self.tree, source, draw)
            assert position is not None
            if position >= stop:
                return
            yield position
