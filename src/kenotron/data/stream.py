"""A stream: text that is tokenized while the run reads it, by lanes that share its files.

    draw    0 1 2 3 4 5 6 7 …          draw n of the source is window n // lanes of lane n % lanes
    lane 0  0   2   4   6               (two lanes; each reads every other file of the epoch)
    lane 1    1   3   5   7

A lane goes only forward. So a rank asks for the draws of its samples step by step, and at the end of each step brings
the lanes that it used to where the *whole* step leaves them, whoever takes the windows between. Where a lane stands
after a step is then the same on every rank that runs it, and on every layout.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, counted

from .batch import Int64
from .cache import SplitTokens
from .encode import EncodeRules, encode_pieces
from .lanes import START, Lane, LaneRules, Place, from_bytes, to_bytes
from .progress import Report
from .split import marked, share_of_hashes
from .texts import Piece, StreamTexts
from .tokenizer import Tokenizer, library_ids
from .words import BORDER, WordEncoder

ENDLESS = 1 << 48
KEPT_STEPS = 4
"""Steps whose lanes' places are remembered: more than batches are made ahead."""

LONGEST_WHOLE = 1 << 23
"""Characters of a piece of text that a tokenizer encodes at once, where it cannot be told where words begin."""

WORDS_AT_ONCE = 1 << 18
TOLD = 1000
"""Windows from which it is told that a lane is read again from its beginning."""


class Stream:
    """The training samples of a stream (`batch.TokenSource`), of draws that only grow.

    One that goes back is read again, from where the lane stood some steps ago if that is enough, else from the
    beginning of the stream: slow, and the same samples.
    """

    def __init__(
        self,
        texts: StreamTexts,
        tokenizer: Tokenizer,
        rules: EncodeRules,
        *,
        sequence_length: int,
        vocab_size: int,
        seed: int,
        shuffle_buffer: int,
        lanes: int,
        val_fraction: float,
        chosen: frozenset[int] = frozenset(),
        report: Report = print,
    ) -> None:
        if lanes > texts.parts:
            raise InputError(
                f"dataset.streaming.lanes: expected at most one lane a file; found {counted(lanes, 'lane')} for the "
                f"{counted(texts.parts, 'file')} of {texts.name}"
            )
        self.name, self.texts, self.key, self._report = texts.name, texts, seed, report
        self.encode = DocumentEncoder(texts.name, tokenizer, rules, vocab_size)
        self.rules = LaneRules(
            texts=texts,
            encode=self.encode,
            sequence_length=sequence_length,
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            lanes=lanes,
            held_out=share_of_hashes(val_fraction),
            single_pieces=rules.max_tokens is not None,
            chosen=chosen,
        )
        self._facts: dict[str, Any] = {
            "files": texts.fingerprint(times=False),
            "tokenizer": tokenizer.hash,
            "eos": rules.eos,
            "max_tokens": rules.max_tokens,
            "val_fraction": val_fraction,
            "sequence_length": sequence_length,
            "seed": seed,
            "shuffle_buffer": shuffle_buffer,
            "lanes": lanes,
            **({"chosen": sorted(chosen)} if chosen else {}),
        }
        self._lanes: dict[int, Lane] = {}
        self._places: dict[int, dict[int, Place]] = {}  # step → lane → where it stood after the step
        self._last: tuple[Int64, NDArray[np.uint32], Int64] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return ENDLESS

    # ---- samples ----

    def samples(self, indices: Int64) -> NDArray[np.uint32]:
        return self._read(indices)[0]

    def documents(self, indices: Int64) -> Int64:
        return self._read(indices)[1]

    def loss(self, indices: Int64) -> None:
        return None

    def _read(self, indices: Int64) -> tuple[NDArray[np.uint32], Int64]:
        """Windows and their documents. What was read last is kept, since the two are asked for one after the other."""
        with self._lock:
            if self._last is not None and np.array_equal(self._last[0], indices):
                return self._last[1], self._last[2]
            windows = np.empty((len(indices), self.rules.sequence_length + 1), dtype=np.uint32)
            documents = np.empty(windows.shape, dtype=np.int64)
            for row in np.argsort(indices, kind="stable"):
                number, lane = divmod(int(indices[row]), self.rules.lanes)
                windows[row], documents[row] = self._lane_at(lane, number).next()
            self._last = indices.copy(), windows, documents
            return windows, documents

    def _lane_at(self, number: int, given: int) -> Lane:
        """Lane `number` where it gave so many windows."""
        lane = self._lanes.get(number)
        if lane is None or lane.place.given > given:
            known = [places[number] for places in self._places.values() if number in places]
            behind = [place for place in known if place.given <= given]
            place = max(behind, key=lambda place: place.given, default=START)
            lane = self._lanes[number] = Lane(self.rules, number, place)
            if (missing := given - place.given) > TOLD:
                self._report(
                    f"{self.name}: lane {number} is read again, {counted(missing, 'sample')}, to where the run is"
                )
        while lane.place.given < given:
            lane.skip()
        return lane

    # ---- where the lanes stand ----

    def given_by(self, lane: int, draws: int) -> int:
        """Windows of `lane` among the first so many draws of the stream."""
        return max(0, -(-(draws - lane) // self.rules.lanes))

    def settle(self, step: int, draws: int, used: Int64) -> None:
        """After `step`, which ends at `draws`: bring the lanes of the draws `used` to its end, and note all places."""
        with self._lock:
            for number in np.unique(used % self.rules.lanes).tolist():
                self._lane_at(number, self.given_by(number, draws))
            self._places[step] = {number: lane.place for number, lane in self._lanes.items()}
            kept = sorted(known for known in self._places if known <= step)[-KEPT_STEPS:]
            self._places = {known: self._places[known] for known in kept}

    def places_after(self, step: int, draws: int) -> dict[int, Place]:
        """The lanes that this process has where `step`, which ends at `draws`, leaves them: where the last step that
        read the stream did, if its stage reads other data."""
        with self._lock:
            last = max((known for known in self._places if known <= step), default=step)
            places = dict(self._places.get(last, {}))
        return {lane: place for lane, place in places.items() if place.given == self.given_by(lane, draws)}

    def to_bytes(self, lane: int, place: Place) -> bytes:
        """A place of a lane as a file holds it."""
        return to_bytes(place, self._facts | {"lane": lane})

    def restore(self, step: int, draws: int, lane: int, data: bytes, where: str) -> None:
        """Put a lane down at the place that `to_bytes` wrote after `step`, which ends at `draws`.

        Errors (InputError, with the file `where`): other files, settings or tokenizer; another position.
        """
        place = from_bytes(data, self._facts | {"lane": lane}, where)
        if place.given != (expected := self.given_by(lane, draws)):
            raise InputError(f"{where}: expected a lane that gave {expected:,} samples, found {place.given:,}")
        if (largest := int(place.state.ids.max(initial=0))) >= self.encode.vocab_size:
            raise InputError(f"{where}: token {largest} is not below the vocabulary of {self.encode.vocab_size:,}")
        with self._lock:
            self._lanes[lane] = Lane(self.rules, lane, place)
            self._places.setdefault(step, {})[lane] = place

    def describe(self) -> str:
        """One line for the console."""
        rules = self.rules
        order = f"shuffled over {rules.shuffle_buffer:,} documents" if rules.shuffle_buffer > 1 else "in their order"
        parts, lanes = counted(self.texts.parts, "file"), counted(rules.lanes, "lane")
        return f"{self.name}: streamed from {parts}, {order}, {lanes}"


class DocumentEncoder:
    """Ids of documents, by the rules of the cached mode, in bounded memory. Words met before keep their ids."""

    def __init__(self, name: str, tokenizer: Tokenizer, rules: EncodeRules, vocab_size: int) -> None:
        self.name, self.tokenizer, self.rules, self.vocab_size = name, tokenizer, rules, vocab_size
        adds_nothing = tokenizer.backend.num_special_tokens_to_add(False) == 0
        self.words = WordEncoder.of(tokenizer.backend) if adds_nothing else None
        self._lock = threading.Lock()  # the kept words are one dict

    def __call__(self, documents: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint32], Int64]:
        """Ids end to end ``[tokens]``, and how many each document has ``[documents]``."""
        pieces = list(chain.from_iterable(documents))
        sizes = np.array([len(document) for document in documents])
        last = np.cumsum(sizes) - 1
        starts, ends = np.zeros(len(pieces), dtype=np.bool_), np.zeros(len(pieces), dtype=np.bool_)
        starts[last - sizes + 1], ends[last] = True, True
        with self._lock:
            ids, lengths, *_ = encode_pieces(self._encode, pieces, starts.tolist(), ends.tolist(), self.rules)
        if len(ids) and (largest := int(ids.max())) >= self.vocab_size:
            raise InputError(
                f"{self.name}: token {largest} is not below model.model_config.vocab_size = {self.vocab_size}; "
                f"the tokenizer {self.tokenizer.name} needs {self.tokenizer.vocab_size}"
            )
        return ids, np.add.reduceat(lengths, last - sizes + 1)

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        if self.words is None:
            for text in texts:
                self._check(text)
            return library_ids(self.tokenizer.backend, texts, special)
        if max(map(len, texts), default=0) <= WORDS_AT_ONCE:
            return self.words.encode(texts)
        return [list(chain.from_iterable(self.words.encode([part])[0] for part in self._cut(text))) for text in texts]

    def _cut(self, text: str) -> list[str]:
        """Parts of a long text, cut only where a word begins whatever lies around: no token changes."""
        assert self.words is not None
        if self.words.has_special(text):
            self._check(text)
            return [text]
        parts, start = [], 0
        while len(text) - start > WORDS_AT_ONCE and (border := BORDER.search(text, start + WORDS_AT_ONCE)):
            parts.append(text[start : border.start()])
            start = border.start()
        parts.append(text[start:])
        for part in parts:
            self._check(part)
        return parts

    def _check(self, text: str) -> None:
        if len(text) > LONGEST_WHOLE:
            raise InputError(
                f"{self.name}: a document of {len(text):,} characters, {text[:40]!r}…, which {self.tokenizer.name} has "
                f"to encode at once; expected at most {LONGEST_WHOLE:,} while streaming: split it"
            )


def all_parts(texts: StreamTexts) -> Iterator[Piece]:
    """Every piece of a stream, in the order of its files."""
    return chain.from_iterable(texts.pieces_from(part, 0) for part in range(texts.parts))


def first_held_out(texts: StreamTexts, encode: DocumentEncoder, val_fraction: float, tokens: int) -> SplitTokens:
    """The first held-out documents of the stream, in the order of its files, that make so many tokens; all there are if
    they make fewer.
    """
    pieces = all_parts(texts)
    if encode.rules.max_tokens is not None:
        pieces = (piece._replace(last=True) for piece in pieces)
    found: list[NDArray[np.uint32]] = []
    lengths: list[int] = []
    size = 0
    waiting: list[str] = []
    if not tokens:
        pieces = iter(())
    for piece in marked(pieces, share_of_hashes(val_fraction)):
        if not piece.held_out:
            continue
        waiting.append(piece.text)
        if not piece.ends:
            continue
        ids, _ = encode([waiting])
        found.append(ids)
        lengths.append(len(ids))
        size += sum(len(text.encode()) for text in waiting)
        waiting = []
        if sum(lengths) >= tokens:
            break
    ids = np.concatenate([np.empty(0, dtype=np.uint32), *found])
    ends = np.cumsum(np.array(lengths, dtype=np.uint64), dtype=np.uint64)
    return SplitTokens(ids, ends, size, int(ids.max(initial=0)) if len(ids) else -1)
