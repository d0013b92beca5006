"""Compute the order of the data: sample i of a stage is a function of i, and nothing is stored.

Two pure functions compose. *Interleave* says which source sample i comes from and how many samples that source
had before; *permute* says which of its samples the n-th draw is:

    i ──interleave──▶ (source, n) ──▶ epoch n // length ──permute──▶ index within the source

Both take arrays and cost the same at sample 0 and at sample 10^12.

**Interleave.** Two sources with weights 3 and 1: of the first n samples, round(n * 3/4) belong to the left one:

    n                0 1 2 3 4 5 6 7 8
    round(n * 3/4)   0 1 2 2 3 4 5 5 6      sample n is left's where the count grows: L L R L L L R L

More sources form a tree of such splits. Every split errs by at most 1/2, and an error made at a node of weight W
reaches a leaf of weight w scaled by w / W, so a leaf is off by at most 1/2 * sum(w / W) over its path
without the root. In a *Huffman* tree (always join the two lightest) a node's sibling is never lighter than
either of the node's children, hence grandparent >= parent + child: up any path weights grow at least like the Fibonacci
numbers, and the sum stays below the sum of their reciprocals, 1 + 1 + 1/2 + 1/3 + 1/5 + ... = 3.36. So after *every*
prefix of i samples, for any number of sources and any weights,

    | samples from source s  -  w_s * i |  <=  1.68

**Permute.** A keyed bijection of [0, length): a Feistel network (Luby and Rackoff 1988) on the fewest bits that hold
`length`, applied again while the image falls outside ("cycle walking", Black and Rogaway 2002). Every epoch has
its own key. No sample of a source is repeated before all have been read once.

**Limits.** The position at which a source with a limited number of samples reaches its limit is computed as well.
There a *phase* ends; the next one splits samples among the remaining sources, which continue from their own counts:

    A 3, B 1 (at most 2 samples)     A A B A A A B A A A . A A A ...
                                     phase 0 ───────────┘ └─ phase 1: A alone
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kenotron.data.batch import Int64
from kenotron.kernels.hashing import GOLDEN, mix64

UInt64 = NDArray[np.uint64]

BLOCK = 4096
"""The number of samples that are located at a time, for speed."""

ROUNDS = 6
_LOW32 = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(GOLDEN)
_ROUND_KEYS = [np.uint64(int(_GOLDEN) * (number + 1) % 2**64) for number in range(ROUNDS)]


# ---- permute -----------------------------------------------------------------------------------------------


def permute(index: Int64, length: int, keys: UInt64) -> Int64:
    """Return the image of every `index` ``[n]`` under the bijection of [0, length) with its key ``[n]``."""
    x = index.astype(np.uint64)
    bits = max(2, (length - 1).bit_length())
    size = np.uint64(length)
    x = _feistel(x, keys, bits)
    outside = np.flatnonzero(x >= size)
    while outside.size:
        x[outside] = _feistel(x[outside], keys[outside], bits)
        outside = outside[x[outside] >= size]
    return x.astype(np.int64)


def _feistel(x: UInt64, keys: UInt64, bits: int) -> UInt64:
    """Apply a bijection of [0, 2^bits), in which each half in turn is xor-ed with a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = x >> low_bits, x & low_mask
    for number in range(ROUNDS):
        key = keys + _ROUND_KEYS[number]
        if number % 2 == 0:
            high = high ^ (mix64(low ^ key) & high_mask)
        else:
            low = low ^ (mix64(high ^ key) & low_mask)
    return (high << low_bits) | low


# ---- interleave --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitNode:
    """A node that sends ``round(n * ratio / 2^64)`` of the first n samples that reach it left, the others right."""

    ratio: int
    left: SplitNode | int
    right: SplitNode | int


def huffman(weights: Sequence[float], sources: Sequence[int] | None = None) -> SplitNode | int:
    """Return the tree of splits for positive `weights`, with a leaf for each of `sources` (None: all), its index."""
    chosen = range(len(weights)) if sources is None else sources
    heap: list[tuple[Fraction, int, SplitNode | int]] = [(Fraction(weights[s]), s, s) for s in chosen]
    heapq.heapify(heap)
    for number in range(len(weights), len(weights) + len(chosen) - 1):
        (light, _, right), (heavy, _, left) = heapq.heappop(heap), heapq.heappop(heap)
        ratio = min(int(heavy * 2**64 / (light + heavy)), 2**64 - 1)
        heapq.heappush(heap, (light + heavy, number, SplitNode(ratio, left, right)))
    return heap[0][2]


def left_count(n: UInt64, ratio: int) -> UInt64:
    """Return ``round(n * ratio / 2^64)``, exact for n < 2^63 (64 x 64 → 128 bit product by halves)."""
    r_low, r_high = np.uint64(ratio & 0xFFFFFFFF), np.uint64(ratio >> 32)
    n_low, n_high = n & _LOW32, n >> np.uint64(32)
    low = n_low * r_low
    middle = n_low * r_high + (low >> np.uint64(32))
    other = n_high * r_low + (middle & _LOW32)
    high = n_high * r_high + (middle >> np.uint64(32)) + (other >> np.uint64(32))
    return high + ((other >> np.uint64(31)) & np.uint64(1))


def interleave(tree: SplitNode | int, positions: Int64) -> tuple[Int64, Int64]:
    """Return, for every position ``[n]``, its source, and the number of earlier samples of that source."""
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


def counts(tree: SplitNode | int, n: int) -> dict[int, int]:
    """Return how many of the first n samples come from each source."""
    if isinstance(tree, int):
        return {tree: n}
    left = (n * tree.ratio + 2**63) >> 64
    return counts(tree.left, left) | counts(tree.right, n - left)


def position_of(tree: SplitNode | int, source: int, draw: int) -> int | None:
    """Return the position of the `draw`-th sample (from 0) of `source`, the inverse of `interleave`; None if no source.

    Left's n-th (from 0) is the sample before the smallest m with ``round(m * ratio / 2^64) = n + 1``.
    """
    if isinstance(tree, int):
        return draw if tree == source else None
    if (n := position_of(tree.left, source, draw)) is not None:
        return -(-((2 * n + 1) << 63) // tree.ratio) - 1
    if (n := position_of(tree.right, source, draw)) is not None:
        return ((2 * n + 1) << 63) // (2**64 - tree.ratio)
    return None


# ---- limits ------------------------------------------------------------------------------------------------

NEVER = 2**62
"""Positions from here on are never reached."""


@dataclass(frozen=True)
class Phase:
    """From position `start` of a stage on, `tree` splits samples; `drawn` counts each source's earlier samples."""

    start: int
    tree: SplitNode | int
    drawn: tuple[int, ...]


class Mixing:
    """Maps each sample of a stage to a source and the number of the draw from it.

    `weights`, `offsets` and `limits` have one entry per source. An offset is the number of samples that earlier stages
    drew, so that a source continues where it stopped; a limit (None: none) bounds the draws of all stages together.
    `when_exhausted` says what happens at a limit: the samples end (stop), the other sources continue (renormalise), or
    the source starts over (repeat).

    `end` is the number of samples (None: endless); `reached` has (source, position) of each limit that is reached, in
    order.
    """

    def __init__(
        self,
        weights: Sequence[float],
        offsets: Sequence[int] | None = None,
        limits: Sequence[int | None] | None = None,
        when_exhausted: Literal["stop", "renormalise", "repeat"] = "repeat",
    ) -> None:
        self.weights = list(weights)
        self.offsets = tuple(offsets or [0] * len(self.weights))
        self.limits = list(limits or [None] * len(self.weights))
        self.phases: list[Phase] = []
        self.reached: list[tuple[int, int]] = []
        self.end: int | None = None
        if when_exhausted == "repeat":
            self._endless()
        else:
            self._divide(stop=when_exhausted == "stop")

    def _endless(self) -> None:
        tree = huffman(self.weights)
        self.phases.append(Phase(0, tree, self.offsets))
        met = ((self._meets(s, tree, self.offsets), s) for s in range(len(self.weights)))
        self.reached = [(s, position) for position, s in sorted(met) if position < NEVER]

    def _divide(self, stop: bool) -> None:
        """Add phases until no source can reach its limit."""
        start, drawn_of = 0, list(self.offsets)
        left = list(range(len(drawn_of)))
        for s in [s for s in left if self._left(s, drawn_of) == 0]:
            left.remove(s)
            self.reached.append((s, 0))
        while left and not (stop and self.reached):
            tree = huffman(self.weights, left)
            self.phases.append(Phase(start, tree, tuple(drawn_of)))
            length, first = min((self._meets(s, tree, drawn_of), s) for s in left)
            if start + length >= NEVER:
                return
            for s, more in counts(tree, length).items():
                drawn_of[s] += more
            start += length
            left.remove(first)
            self.reached.append((first, start))
        self.end = start

    def _left(self, source: int, drawn_of: Sequence[int]) -> int | None:
        limit = self.limits[source]
        return None if limit is None else max(0, limit - drawn_of[source])

    def _meets(self, source: int, tree: SplitNode | int, drawn_of: Sequence[int]) -> int:
        """Return the position, from the phase's start, of the source's first sample beyond its limit."""
        left = self._left(source, drawn_of)
        position = NEVER if left is None else position_of(tree, source, left)
        assert position is not None
        return min(position, NEVER)

    def draws(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return source and draw ``[n]`` (which includes earlier stages) of the samples at `positions`.

        Raises IndexError if there is no such sample.
        """
        if self.end is not None and positions.size and positions.max() >= self.end:
            raise IndexError(f"sample {positions.max()} of {self.end}")
        source, draw = np.empty_like(positions), np.empty_like(positions)
        phase_of = np.searchsorted([phase.start for phase in self.phases], positions, side="right") - 1
        for number in np.unique(phase_of):
            phase, where = self.phases[number], np.flatnonzero(phase_of == number)
            source[where], draw[where] = interleave(phase.tree, positions[where] - phase.start)
            draw[where] += np.array(phase.drawn, dtype=np.int64)[source[where]]
        return source, draw

    def drawn(self, samples: int) -> list[int]:
        """Return how many samples are drawn from each source, earlier stages included, after `samples` of this one."""
        samples = samples if self.end is None else min(samples, self.end)
        phase = next((phase for phase in reversed(self.phases) if phase.start <= samples), None)
        if phase is None:
            return list(self.offsets)
        drawn = counts(phase.tree, samples - phase.start)
        return [before + drawn.get(s, 0) for s, before in enumerate(phase.drawn)]


# ---- both --------------------------------------------------------------------------------------------------


class Order:
    """The source of sample i of one stage: ``locate(positions) -> (source, index within the source)``.

    `lengths` and `keys` have one entry per source, like the weights of `mixing`. A stream has the length None; its
    index is the number of the draw.
    """

    def __init__(self, lengths: Sequence[int | None], keys: Sequence[int], mixing: Mixing) -> None:
        self.lengths, self.keys, self.mixing = list(lengths), list(keys), mixing
        self._block = lru_cache(maxsize=8)(self._compute_block)

    def locate(self, positions: Int64) -> tuple[Int64, Int64]:
        """Return source numbers ``[n]`` and indices ``[n]`` of the samples at `positions` ``[n]``.

        Raises IndexError if there is no such sample because sources are exhausted.
        """
        block_of = positions // BLOCK
        if len(positions) and (block_of == block_of[0]).all():  # nearly always true
            sources, indices = self._block(int(block_of[0]))
            inside = positions % BLOCK
            return sources[inside], indices[inside]
        source = np.empty(len(positions), dtype=np.int64)
        index = np.empty(len(positions), dtype=np.int64)
        for block in np.unique(block_of):
            where = np.flatnonzero(block_of == block)
            inside = positions[where] - block * BLOCK
            sources, indices = self._block(int(block))
            source[where], index[where] = sources[inside], indices[inside]
        return source, index

    def _compute_block(self, block: int) -> tuple[Int64, Int64]:
        last = (block + 1) * BLOCK if self.mixing.end is None else min((block + 1) * BLOCK, self.mixing.end)
        source, draw = self.mixing.draws(np.arange(block * BLOCK, last, dtype=np.int64))
        index = np.empty_like(draw)
        for s in np.unique(source):
            where = np.flatnonzero(source == s)
            length = self.lengths[s]
            if length is None:
                index[where] = draw[where]
                continue
            epoch, rest = np.divmod(draw[where], length)
            epoch_keys = mix64(np.uint64(self.keys[s]) ^ mix64(epoch.astype(np.uint64) + _GOLDEN))
            index[where] = permute(rest, length, epoch_keys)
        return source, index
