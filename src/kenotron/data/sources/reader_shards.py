"""The reader of a stream: documents → shuffle buffer → tokens → windows, with a state that can always be saved.

    shard 0   a.jsonl  c.jsonl  …      files of the epoch, dealt to reader shards, which yield documents in turn; one
    shard 1   b.jsonl  d.jsonl  …      without documents left is skipped. `places` has the cursor of each
    documents                              a1 b1 a2 b2 a3 c1 …
    shuffle buffer, drawn at random       [doc 7] [doc 2] [doc 9]         `drawn` documents so far
    tokens, ends of documents             5 6 3 1 4 | 7 8 9 2 5 | …
    windows                               [5 6 3 1 4] [4 7 8 9 2] …       `emitted` so far

Documents are drawn a *block* at a time, about a hundred thousand characters, and tokenized. The state before a block is
kept until the next one, so a reader's position is a state and the number of windows of the following block that were
emitted. Both are cheap, since texts are shared, not copied; a restored reader tokenizes one block again.

An epoch ends for all shards together, when the shuffle buffer is empty and no shard has a document left. So every
document is read once before any is read again, for any sizes of files.
"""

import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.batch import Int64
from kenotron.data.sources.windows import document_numbers
from kenotron.kernels.hashing import derive_key, hash64
from kenotron.text.compression import DAMAGE
from kenotron.text.documents import StreamableDocuments
from kenotron.text.hash_split import assign_sides, threshold_of_fraction

BLOCK_CHARACTERS = 1 << 17
"""Characters that are tokenized at a time, which affects only speed and memory."""

LONGEST_DOCUMENT = 1 << 22
"""Characters after which a text that comes in pieces is cut; the rest is another document."""

BUFFER_CHARACTERS = 1 << 26
"""Characters at which a shuffle buffer counts as full, however few documents it has."""

Document = tuple[str, ...]
"""The consecutive pieces of a document."""


@dataclass(frozen=True)
class ShardRules:
    """The rules by which a stream is read.

    `encode` converts documents to ids. Texts whose hash is below `val_fraction` of all hashes, or among `chosen`, are
    left out. `single_pieces`: every piece counts as a document.
    """

    texts: StreamableDocuments
    encode: Callable[[Sequence[Document]], tuple[NDArray[np.uint32], Int64]]
    sequence_length: int
    seed: int
    shuffle_buffer: int
    shards: int
    val_fraction: float
    single_pieces: bool
    chosen: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ShardState:
    """The state of a reader before a block, after `emitted` windows.

    `places` has the cursor of every shard that has begun, a file's index and a position in it; the shard `turn` is
    next.
    """

    epoch: int
    places: tuple[tuple[int, int], ...]
    turn: int
    drawn: int
    emitted: int
    buffer: tuple[Document, ...]
    ids: NDArray[np.uint32]
    ends: Int64


BEGINNING = ShardState(0, (), 0, 0, 0, (), np.empty(0, np.uint32), np.empty(0, np.int64))


class ShardPosition(NamedTuple):
    """The position of a reader: `after` windows past a state."""

    state: ShardState
    after: int

    @property
    def emitted(self) -> int:
        """The number of windows emitted so far."""
        return self.state.emitted + self.after


START = ShardPosition(BEGINNING, 0)


class StreamReader:
    """A stream from `position` on. Nothing is read before the first window is requested."""

    def __init__(self, rules: ShardRules, position: ShardPosition = START) -> None:
        self.rules = rules
        self.position = position
        self._ids, self._ends = position.state.ids, position.state.ends
        self._epoch, self._turn = position.state.epoch, position.state.turn
        self._places = list(position.state.places) or [(0, 0)] * rules.shards
        self._drawn, self._buffer = position.state.drawn, list(position.state.buffer)
        self._characters = sum(map(_characters, self._buffer))
        self._reader = self._documents()
        self._again = position.after > 0

    def next(self) -> tuple[NDArray[np.uint32], Int64]:
        """Return the next window ``[sequence_length + 1]``, and the document number of each of its tokens."""
        start = self.advance()
        size = self.rules.sequence_length + 1
        numbers = document_numbers(self._ends.astype(np.uint64), np.array([start]), size, self.rules.texts.name)[0]
        return self._ids[start : start + size], numbers

    def advance(self) -> int:
        """Return the offset of the next window in the current tokens, and count it as emitted."""
        if self._again:  # the block after the state that this reader began with
            self._extend()
            self._again = False
        length = self.rules.sequence_length
        while len(self._ids) < (self.position.after + 1) * length + 1:
            self._refill()
        state, after = self.position
        self.position = ShardPosition(state, after + 1)
        return after * length

    def _refill(self) -> None:
        """Drop the emitted tokens, keep the state, and draw a block."""
        gone = self.position.after * self.rules.sequence_length
        self._ids, self._ends = self._ids[gone:].copy(), self._ends[self._ends > gone] - gone
        where = (self._epoch, tuple(self._places), self._turn, self._drawn, self.position.emitted)
        self.position = ShardPosition(ShardState(*where, tuple(self._buffer), self._ids, self._ends), 0)
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
        """Return a random document of the buffer. An epoch ends when the buffer is empty and all files are read."""
        self._fill()
        if not self._buffer:
            read, self._epoch, self._turn, self._drawn = self._drawn, self._epoch + 1, 0, 0
            self._places = [(0, 0)] * self.rules.shards
            self._reader = self._documents()
            self._fill()
            if not (read and self._buffer):
                raise InputError(f"{self.rules.texts.name}: no document to train on")
        key = derive_key("shuffle buffer", self.rules.seed, 0, self._epoch)
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
        """Yield the remaining documents of this epoch, one of every shard in turn."""
        shards = [self._documents_of(shard) for shard in range(self.rules.shards)]
        left = set(range(self.rules.shards))
        while left:
            shard, self._turn = self._turn, (self._turn + 1) % self.rules.shards
            if shard in left:
                if (document := next(shards[shard], None)) is None:
                    left.remove(shard)
                else:
                    yield document

    def _documents_of(self, shard: int) -> Iterator[Document]:
        """Yield the remaining documents of a shard's files, from its cursor on."""
        parts = epoch_order(self.rules, self._epoch)[shard :: self.rules.shards]
        index, offset = self._places[shard]
        while index < len(parts):
            waiting: list[str] = []
            chunks, rules = self.rules.texts.chunks_from(parts[index], offset), self.rules
            limit = threshold_of_fraction(rules.val_fraction)
            for piece in assign_sides(chunks, limit, rules.chosen, separate=rules.single_pieces):
                if piece.held_out:
                    continue
                waiting.append(piece.text)
                if piece.ends or _characters(waiting) >= LONGEST_DOCUMENT:
                    self._places[shard] = (index, piece.done)
                    yield tuple(waiting)
                    waiting = []
            index, offset = index + 1, 0
            self._places[shard] = (index, offset)


def epoch_order(rules: ShardRules, epoch: int) -> list[int]:
    """Return the files of a stream in this epoch's order, unshuffled if the buffer holds only one document."""
    parts = range(rules.texts.parts)
    if rules.shuffle_buffer == 1:
        return list(parts)
    key = derive_key("stream files", rules.seed, epoch)
    return sorted(parts, key=lambda part: hash64(key, part))


def _characters(pieces: Sequence[str]) -> int:
    return sum(map(len, pieces))


# ---- a position as bytes -----------------------------------------------------------------------------------

FORMAT = 2


def to_bytes(position: ShardPosition, facts: dict[str, object]) -> bytes:
    """Return gzipped JSON of a reader's position, with `facts` that `from_bytes` compares."""
    state = vars(position.state) | {"ids": position.state.ids.tolist(), "ends": position.state.ends.tolist()}
    saved = {"format": FORMAT, **facts, "after": position.after, "state": state}
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as bytes_of,
        io.TextIOWrapper(bytes_of, encoding="utf-8") as text,
    ):
        # Written piece by piece: as one string, a buffer with a wide character is large.
        json.dump(saved, text, ensure_ascii=False)
    return packed.getvalue()


def from_bytes(data: bytes, facts: dict[str, object], where: str) -> ShardPosition:
    """Return the position that `to_bytes` wrote. Raises InputError, with `where`, if it is another stream's."""
    try:
        saved = json.loads(gzip.decompress(data))
        position = _position(saved["state"], saved["after"]) if saved["format"] == FORMAT else START
    except (*DAMAGE, OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{where}: not the state of a stream ({type(error).__name__}: {error})") from None
    for name, value in {"format": FORMAT, **facts}.items():
        if saved.get(name) != value:
            raise InputError(
                f"{where}: the state of another stream: {name} is {saved.get(name)!r} there and {value!r} in this run; "
                "put the old value or files back, or start over (--fresh, checkpoints.load_lr_scheduler: false)"
            )
    return position


def _position(state: dict[str, Any], after: int) -> ShardPosition:
    """Return a position from its JSON form."""
    state = {field.name: state[field.name] for field in fields(ShardState)}
    state |= {"ids": np.array(state["ids"], np.uint32), "ends": np.array(state["ends"], np.int64)}
    state |= {name: tuple(map(tuple, state[name])) for name in ("buffer", "places")}
    return ShardPosition(ShardState(**state), after)
