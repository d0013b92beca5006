"""Which documents are held out, and where a document starts and ends once the held-out ones are taken away.

A document is held out when the hash of its text falls below `tokens.val_fraction` of all hashes. In a small set it may
be that none does; then it is the one with the smallest hash, as long as another one is left to train on:

    fraction 0.05        0.31  0.87  0.04  0.52      the third
    fraction 0.05        0.31  0.87        0.52      the first

That one was chosen in its set alone, so a run holds it out of all of its texts: their hashes are `chosen`.

A long text comes in chunks (texts.py), each of which is held out or not by itself. It is one document still, but where
its next chunk goes to the other side it ends, since what would come next there does not follow:

    book     a a a b b       a: training, b: held out
    train    a a a|          | the end of a document
    held out       b b|
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import xxhash

from kenotron.text.documents import DocumentChunk, TextChunk


@dataclass(slots=True)
class AssignedChunk(TextChunk):
    """A chunk of text with its side; documents start and end with it there."""

    held_out: bool


def text_hash(text: str) -> int:
    """64 bits."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8"))


def threshold_of_fraction(fraction: float) -> int:
    """The number that this share of all 64-bit hashes falls below."""
    return int(fraction * 2**64)


def hash_threshold(chunks: Iterable[DocumentChunk], fraction: float) -> int:
    """The number below which a text's hash must fall for it to be held out.

    That is `threshold_of_fraction`, known at the first text below it. If none of two or more different texts is below
    it, the threshold is just above the smallest hash. Blank texts do not count: nothing could be validated on them.
    """
    limit, smallest, largest = threshold_of_fraction(fraction), 2**64, -1
    for chunk in chunks:
        if not chunk.text.strip():
            continue
        value = text_hash(chunk.text)
        if value < limit:
            return limit
        smallest, largest = min(value, smallest), max(value, largest)
    return smallest + 1 if smallest < largest else limit


def is_held_out(text: str, limit: int, chosen: Collection[int] = ()) -> bool:
    """Does this text belong to validation?"""
    value = text_hash(text)
    return value < limit or value in chosen


def assign_sides(
    chunks: Iterable[DocumentChunk], limit: int, chosen: Collection[int] = (), separate: bool = False
) -> Iterator[AssignedChunk]:
    """Every chunk with its side, and where documents start and end; with `separate` each chunk is a document."""
    waiting: AssignedChunk | None = None  # `ends` is known once the next chunk is
    last = True
    for chunk in chunks:
        side = is_held_out(chunk.text, limit, chosen)
        if waiting is not None:
            waiting.ends = last or side != waiting.held_out
            yield waiting
        waiting = AssignedChunk(chunk.text, chunk.done, waiting is None or waiting.ends, ends=True, held_out=side)
        last = chunk.last or separate
    if waiting is not None:
        yield waiting
