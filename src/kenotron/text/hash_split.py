"""Choose held-out documents by hash, and mark where documents start and end in the training and held-out splits.

A document is held out if the hash of its text is below `tokens.val_fraction` of all hashes. If in a small set none is,
the document with the smallest hash is held out, as long as another one is left to train on:

    fraction 0.05        0.31  0.87  0.04  0.52      the third
    fraction 0.05        0.31  0.87        0.52      the first

Such a document was chosen in its set only, so a run holds it out of all of its texts: these hashes are `chosen`.

A long text comes in chunks (documents.py), each of which is held out or not by its own hash. The text is still one
document, but ends where its next chunk goes to the other split, because the following chunk there is not contiguous:

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
    """A chunk of text with its split, and whether documents start and end with it there."""

    held_out: bool


def text_hash(text: str) -> int:
    """Return the 64-bit hash of a text."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8"))


def threshold_of_fraction(fraction: float) -> int:
    """Return the number below which this fraction of all 64-bit hashes is."""
    return int(fraction * 2**64)


def hash_threshold(chunks: Iterable[DocumentChunk], fraction: float) -> int:
    """Return the number below which the hash of a held-out text must be.

    It is `threshold_of_fraction` as soon as one text is below it. If none of two or more different texts is, the
    threshold is just above the smallest hash. Blank texts do not count: nothing could be validated on them.
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
    """Return whether this text belongs to validation."""
    value = text_hash(text)
    return value < limit or value in chosen


def assign_sides(
    chunks: Iterable[DocumentChunk], limit: int, chosen: Collection[int] = (), separate: bool = False
) -> Iterator[AssignedChunk]:
    """Yield every chunk with its split, and where documents start and end; with `separate` chunks are documents."""
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
