"""One reader of a stream: documents → shuffle buffer → tokens → windows, with a state that can be put down anywhere.

    files of the epoch, this lane's       a.jsonl  c.jsonl  …             `turn` and `place` say how far
    shuffle buffer, drawn at random       [doc 7] [doc 2] [doc 9]         `drawn` documents so far
    tokens, ends of documents             5 6 3 1 4 | 7 8 9 2 5 | …
    windows                               [5 6 3 1 4] [4 7 8 9 2] …       `given` so far

Documents are drawn a *block* at a time, about a hundred thousand characters, and tokenized. The state before a block is
kept until the next one, so where a lane stands is two things: a state, and how many windows the block behind it gave.
Both are cheap, since texts are shared, not copied; and whoever takes a lane up again tokenizes one block again.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.kernels.hashing import derive_key, hash64

from .batch import Int64
from .sources import document_numbers
from .split import marked
from .texts import DAMAGE, Piece, StreamTexts

BLOCK_CHARACTERS = 1 << 17
"""Text that is tokenized at once; a matter of speed and memory only."""

LONGEST_DOCUMENT = 1 << 22
"""Characters from which a text that comes in pieces is cut: what follows is another document."""

BUFFER_CHARACTERS = 1 << 26
"""Text at which a shuffle buffer counts as full, however few its documents."""

EMPTY_EPOCHS = 1000
"""Epochs without a document after which a lane gives up."""

Document = tuple[str, ...]
"""The pieces of a document, end to end."""


@dataclass(frozen=True)
class LaneRules:
    """What the lanes of a stream share.

    `encode` makes ids of documents; texts with a hash below `held_out`, or among `chosen`, are left out;
    `single_pieces`: every piece counts as a document.
    """

    texts: StreamTexts
    encode: Callable[[Sequence[Document]], tuple[NDArray[np.uint32], Int64]]
    sequence_length: int
    seed: int
    shuffle_buffer: int
    lanes: int
    held_out: int
    single_pieces: bool
    chosen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LaneState:
    """Where a lane stands before a block; `given` counts the windows before it. See the module."""

    epoch: int
    turn: int
    place: int
    drawn: int
    given: int
    buffer: tuple[Document, ...]
    ids: NDArray[np.uint32]
    ends: Int64


BEGINNING = LaneState(0, 0, 0, 0, 0, (), np.empty(0, np.uint32), np.empty(0, np.int64))


class Place(NamedTuple):
    """Where a lane stands: `after` windows behind a state."""

    state: LaneState
    after: int

    @property
    def given(self) -> int:
        return self.state.given + self.after


START = Place(BEGINNING, 0)


class Lane:
    """Lane `number` of a stream, from `place` on. Nothing is read before a window is asked for."""

    def __init__(self, rules: LaneRules, number: int, place: Place = START) -> None:
        self.rules, self.number = rules, number
        self.place = place
        self._ids, self._ends = place.state.ids, place.state.ends
        self._epoch, self._turn, self._at = place.state.epoch, place.state.turn, place.state.place
        self._drawn, self._buffer = place.state.drawn, list(place.state.buffer)
        self._characters = sum(map(_characters, self._buffer))
        self._reader = self._documents()
        self._again = place.after > 0

    def next(self) -> tuple[NDArray[np.uint32], Int64]:
        """The next window ``[sequence_length + 1]``, and the number of the document of each of its tokens."""
        start = self._ready()
        size = self.rules.sequence_length + 1
        numbers = document_numbers(self._ends.astype(np.uint64), np.array([start]), size, self.rules.texts.name)[0]
        return self._ids[start : start + size], numbers

    def skip(self) -> None:
        """Leave the next window out."""
        self._ready()

    def _ready(self) -> int:
        """Where the next window begins in the tokens at hand; it counts as given."""
        if self._again:  # the block behind the state that this lane was put down with
            self._extend()
            self._again = False
        length = self.rules.sequence_length
        while len(self._ids) < (self.place.after + 1) * length + 1:
            self._refill()
        state, after = self.place
        self.place = Place(state, after + 1)
        return after * length

    def _refill(self) -> None:
        """Drop the tokens that were given, note the state, draw a block."""
        gone = self.place.after * self.rules.sequence_length
        self._ids, self._ends = self._ids[gone:].copy(), self._ends[self._ends > gone] - gone
        where = (self._epoch, self._turn, self._at, self._drawn, self.place.given)
        self.place = Place(LaneState(*where, tuple(self._buffer), self._ids, self._ends), 0)
        self._extend()

    def _extend(self) -> None:
        block: list[Document] = []
        size, epoch = 0, self._epoch
        while size < BLOCK_CHARACTERS and epoch == self._epoch:  # a small set is not read a hundred times for a block
            block.append(self._draw())
            size += _characters(block[-1]) + 1
        ids, lengths = self.rules.encode(block)
        self._ends = np.concatenate([self._ends, len(self._ids) + np.cumsum(lengths)])
        self._ids = np.concatenate([self._ids, ids])

    def _draw(self) -> Document:
        """A document of the buffer at random. An epoch ends when the buffer is empty and its files are read.

        The files of a lane are others in every epoch: it may be that one holds out all of them.
        """
        self._fill()
        empty = 0
        while not self._buffer:
            if (self._epoch, self._drawn) == (0, 0):
                raise InputError(
                    f"{self.rules.texts.name}: lane {self.number} of {self.rules.lanes} has no document to train on"
                )
            if (empty := empty + 1) > EMPTY_EPOCHS:
                raise InputError(f"{self.rules.texts.name}: lane {self.number} finds no document any more")
            self._epoch, self._turn, self._at, self._drawn = self._epoch + 1, 0, 0, 0
            self._reader = self._documents()
            self._fill()
        key = derive_key("shuffle buffer", self.rules.seed, self.number, self._epoch)
        chosen = (hash64(key, self._drawn) * len(self._buffer)) >> 64
        document, last = self._buffer[chosen], self._buffer.pop()
        if chosen < len(self._buffer):
            self._buffer[chosen] = last
        self._drawn += 1
        self._characters -= _characters(document)
        return document

    def _fill(self) -> None:
        while len(self._buffer) < self.rules.shuffle_buffer and self._characters < BUFFER_CHARACTERS:
            document = next(self._reader, None)
            if document is None:
                return
            self._buffer.append(document)
            self._characters += _characters(document)

    def _documents(self) -> Iterator[Document]:
        """The documents that are left of this epoch; `_turn` and `_at` tell where the next one begins."""
        parts = epoch_order(self.rules, self._epoch)[self.number :: self.rules.lanes]
        while self._turn < len(parts):
            waiting: list[str] = []
            for piece in marked(self._pieces(parts[self._turn]), self.rules.held_out, self.rules.chosen):
                if piece.held_out:
                    continue
                waiting.append(piece.text)
                if piece.ends or _characters(waiting) >= LONGEST_DOCUMENT:
                    self._at = piece.done
                    yield tuple(waiting)
                    waiting = []
            self._turn, self._at = self._turn + 1, 0

    def _pieces(self, part: int) -> Iterator[Piece]:
        for piece in self.rules.texts.pieces_from(part, self._at):
            yield piece._replace(last=True) if self.rules.single_pieces else piece


def epoch_order(rules: LaneRules, epoch: int) -> list[int]:
    """The parts of a stream in the order of this epoch; nothing is shuffled where the buffer holds one document."""
    parts = range(rules.texts.parts)
    if rules.shuffle_buffer == 1:
        return list(parts)
    key = derive_key("stream files", rules.seed, epoch)
    return sorted(parts, key=lambda part: hash64(key, part))


def _characters(pieces: Sequence[str]) -> int:
    return sum(map(len, pieces))


# ---- a place as bytes --------------------------------------------------------------------------------------

FORMAT = 1


def to_bytes(place: Place, facts: dict[str, Any]) -> bytes:
    """Gzipped JSON of a lane's place, with `facts` that `from_bytes` compares."""
    state = {name: getattr(place.state, name) for name in (field.name for field in fields(LaneState))}
    state |= {"ids": place.state.ids.tolist(), "ends": place.state.ends.tolist()}
    told = {"format": FORMAT, **facts, "after": place.after, "state": state}
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as bytes_of,
        io.TextIOWrapper(bytes_of, encoding="utf-8") as text,
    ):
        json.dump(told, text, ensure_ascii=False)  # as it is made: as one text, a buffer with a wide character is large
    return packed.getvalue()


def from_bytes(data: bytes, facts: dict[str, Any], where: str) -> Place:
    """What `to_bytes` wrote. Errors (InputError, with `where`): no such state, or one of another stream."""
    try:
        told = json.loads(gzip.decompress(data))
        place = _checked(told["state"], told["after"])
    except (*DAMAGE, OSError, ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{where}: not the state of a stream ({type(error).__name__}: {error})") from None
    for name, value in {"format": FORMAT, **facts}.items():
        if told.get(name) != value:
            raise InputError(
                f"{where}: the state of another stream: {name} is {told.get(name)!r} there and {value!r} in this run; "
                "put the old value or files back, or start over (--fresh, checkpoints.load_lr_scheduler: false)"
            )
    return place


def _checked(state: dict[str, Any], after: int) -> Place:
    """A place as JSON holds it; any of the usual errors for one that no lane was ever in."""
    ids, ends = np.array(state["ids"], np.uint32), np.array(state["ends"], np.int64)
    buffer = tuple(map(tuple, state["buffer"]))
    numbers = [after, *(state[name] for name in ("epoch", "turn", "place", "drawn", "given"))]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ValueError(f"expected counts, found {numbers}")
    kinds = {type(document) for document in state["buffer"]}, {type(text) for each in buffer for text in each}
    if kinds[0] - {list} or kinds[1] - {str}:
        raise ValueError("expected lists of texts in its buffer")
    if ids.ndim != 1 or (np.diff(ends, prepend=0, append=len(ids)) < 0).any():
        raise ValueError("the ends of its documents do not ascend to the last of its tokens")
    return Place(LaneState(**state | {"ids": ids, "ends": ends, "buffer": buffer}), after)
