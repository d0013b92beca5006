"""Compute which queries attend to which keys when ranks share a sequence, on host integers.

**Chunks.** A causal query attends to the keys before it, so the last tokens cost most. If a sequence is cut into 2n
chunks, and rank r holds chunks r and 2n - 1 - r, every rank has the same work (zig-zag; each `#` is a chunk of keys):

    contiguous, n = 2                zig-zag, n = 2
    rank 0   chunk 0  #              rank 0   chunk 0  #
             chunk 1  ##                      chunk 3  ####
    rank 1   chunk 2  ###            rank 1   chunk 1  ##
             chunk 3  ####                    chunk 2  ###

**Blocks.** Attention is then a list of rectangles that need no mask: a document's tokens in a chunk attend to each
other causally (`local_blocks`), and tokens of a document that began before the chunk attend to all its earlier tokens
(`earlier_blocks`). Document borders refer to the full sequences. Pairs of chunks without a common document have no
block, and cost no work.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from kenotron.kernels.attention import document_lengths

Chunks = tuple[tuple[int, int], ...]  # (begin, end) of each chunk of a sequence, in a rank's order
Corners = tuple[int, int, int, int]  # queries from, to, keys from, to: local indices


class ScoreBlock(NamedTuple):
    """In sequences `rows`, this rank's queries `q` attend to keys `k` (of any rank), fully or causally."""

    rows: slice
    q: slice
    k: slice
    causal: bool


def zigzag(length: int, degree: int, rank: int) -> Chunks:
    """Return chunks `rank` and ``2 * degree - 1 - rank`` of a sequence; `length` is a multiple of ``2 * degree``."""
    chunk = length // (2 * degree)
    first, second = rank * chunk, (2 * degree - 1 - rank) * chunk
    if first + chunk == second:
        return ((first, second + chunk),)
    return ((first, first + chunk), (second, second + chunk))


def contiguous(length: int, degree: int, rank: int) -> Chunks:
    """Return the `rank`-th of `degree` equal chunks."""
    part = length // degree
    return ((rank * part, (rank + 1) * part),)


@lru_cache(maxsize=256)
def local_blocks(chunks: Chunks, sequences: int, length: int, cu_seqlens: tuple[int, ...] | None) -> list[ScoreBlock]:
    """Return the blocks of every chunk with itself, by document; they cover each query and each key once."""
    corners: dict[Corners, list[int]] = {}
    for row, documents in enumerate(_documents(sequences, length, cu_seqlens)):
        for begin, end, at in _placed(chunks):
            for from_, to in documents:
                first, last = max(begin, from_) - begin + at, min(end, to) - begin + at
                if first < last:
                    corners.setdefault((first, last, first, last), []).append(row)
    return _merge_sequences(corners, causal=True)


@lru_cache(maxsize=256)
def earlier_blocks(
    chunks: Chunks, key_chunks: Chunks, sequences: int, length: int, cu_seqlens: tuple[int, ...] | None
) -> list[ScoreBlock]:
    """Return the blocks of each chunk's queries with keys in `key_chunks` of the same document before the chunk."""
    corners: dict[Corners, list[int]] = {}
    for row, documents in enumerate(_documents(sequences, length, cu_seqlens)):
        found: list[Corners] = []
        for begin, end, at in _placed(chunks):
            from_, to = next(document for document in documents if document[1] > begin)
            for first, last in _held(key_chunks, from_, begin):
                _extend(found, (at, at + min(end, to) - begin, first, last))
        for corner in found:
            corners.setdefault(corner, []).append(row)
    return _merge_sequences(corners, causal=False)


def _documents(sequences: int, length: int, cu_seqlens: tuple[int, ...] | None) -> list[list[tuple[int, int]]]:
    """Return (begin, end) of every document, for each sequence."""
    if cu_seqlens is None:
        return [[(0, length)]] * sequences
    rows = document_lengths(cu_seqlens, sequences, length)
    return [list(pairwise(accumulate(row, initial=0))) for row in rows]


def _placed(chunks: Chunks) -> list[tuple[int, int, int]]:
    """Return (begin, end, local offset) of each chunk."""
    places = accumulate((end - begin for begin, end in chunks), initial=0)
    return [(begin, end, at) for (begin, end), at in zip(chunks, places)]


def _held(chunks: Chunks, begin: int, end: int) -> list[tuple[int, int]]:
    """Return local ranges of the tokens from `begin` to `end`; chunks that are adjacent in memory are one range."""
    ranges = ((max(begin, from_) - from_ + at, min(end, to) - from_ + at) for from_, to, at in _placed(chunks))
    return _joined((first, last) for first, last in ranges if first < last)


def _extend(found: list[Corners], corner: Corners) -> None:
    """Add a rectangle, merged into the last one if it continues its queries over the same keys."""
    if found and found[-1][1] == corner[0] and found[-1][2:] == corner[2:]:
        corner = (found.pop()[0], *corner[1:])
    found.append(corner)


def _merge_sequences(corners: dict[Corners, list[int]], causal: bool) -> list[ScoreBlock]:
    """Return one block for adjacent sequences that have the same rectangle."""
    blocks = []
    for (q_from, q_to, k_from, k_to), rows in corners.items():
        for first, last in _joined((row, row + 1) for row in rows):
            blocks.append(ScoreBlock(slice(first, last), slice(q_from, q_to), slice(k_from, k_to), causal))
    return blocks


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent ranges: [(0, 1), (1, 3), (5, 6)] → [(0, 3), (5, 6)]."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, last))
    return joined
