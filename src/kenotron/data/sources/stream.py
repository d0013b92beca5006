"""A stream is text that is tokenized while the run reads it.

It is one sequence of windows (reader_shards.py), and draw n is window n. It is only read forward: a rank reads its
samples step by step, and at the end of each step advances the stream past the *global* batch, including the windows of
other ranks. So the position after a step is the same on every rank and layout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kenotron.config.data_stages import Streaming
from kenotron.config.errors import InputError, counted
from kenotron.data.batch import Int64
from kenotron.data.cache import SplitTokens
from kenotron.data.cached_folder import cache_entry, cached_folder
from kenotron.data.source import Opening, Samples, StreamSource, TokenSource
from kenotron.data.sources.reader_shards import START, ShardPosition, ShardRules, StreamReader, from_bytes, to_bytes
from kenotron.data.sources.windows import HeldOutWindows
from kenotron.text.documents import DocumentChunk, StreamableDocuments
from kenotron.text.encode import EncodeRules, encode_chunks
from kenotron.text.hash_split import assign_sides, threshold_of_fraction
from kenotron.text.pretoken_cache import CachedBPE
from kenotron.text.progress import Report
from kenotron.text.tokenizer import TextTokenizer, library_ids

ENDLESS = 1 << 48
KEPT_STEPS = 4
"""The number of steps whose positions are kept, larger than the number of steps prepared ahead."""

LONGEST_TEXT = 1 << 23
"""Characters that a tokenizer can encode at a time in bounded memory."""

REPORTED_WINDOWS = 1000
"""Re-reading at least this many windows is reported."""


class Stream(StreamSource):
    """The training samples of a stream, read forward.

    Going back re-reads the same samples, from the position some steps ago if possible, else slowly from the beginning.
    """

    def __init__(self, rules: ShardRules, encode: DocumentEncoder, report: Report) -> None:
        self.rules, self.encode, self.texts = rules, encode, rules.texts
        self.name, self._report = rules.texts.name, report
        self._facts: dict[str, object] = {
            "files": rules.texts.fingerprint(times=False),
            "tokenizer": encode.tokenizer.hash,
            "eos": encode.rules.eos,
            "max_tokens": encode.rules.max_tokens,
            "val_fraction": rules.val_fraction,
            "sequence_length": rules.sequence_length,
            "seed": rules.seed,
            "shuffle_buffer": rules.shuffle_buffer,
            "reader_shards": rules.shards,
            **({"chosen": sorted(rules.chosen)} if rules.chosen else {}),
        }
        self._reader = StreamReader(self.rules)
        self._positions: dict[int, ShardPosition] = {}  # after a step
        self._lock = threading.Lock()
        self.to_validate_on: TokenSource = super().held_out

    def __len__(self) -> int:
        return ENDLESS

    def read(self, indices: Int64, document_ids: bool = True) -> Samples:
        """Return the samples `indices` ``[n]``."""
        windows = np.empty((len(indices), self.rules.sequence_length + 1), dtype=np.uint32)
        documents = np.empty(windows.shape, dtype=np.int64)
        with self._lock:
            for row in np.argsort(indices, kind="stable"):
                windows[row], documents[row] = self._reader_at(int(indices[row])).next()
        return Samples(windows, documents if document_ids else None)

    @property
    def held_out(self) -> TokenSource:
        """Return the first held-out documents of the stream."""
        return self.to_validate_on

    @property
    def fingerprint(self) -> str:
        """Return a key of the names, sizes and times of the stream's files."""
        return self.texts.fingerprint(times=True)

    def measure(self, unit: str) -> int:
        """Raise InputError: the length of a stream is unknown."""
        raise InputError(f"dataset.weight: {unit}: how much there is of the stream {self.name} is not known")

    def _reader_at(self, emitted: int) -> StreamReader:
        """Return the reader after `emitted` windows."""
        if self._reader.position.emitted > emitted:
            earlier = [position for position in self._positions.values() if position.emitted <= emitted]
            position = max(earlier, key=lambda each: each.emitted, default=START)
            self._reader = StreamReader(self.rules, position)
            if (missing := emitted - position.emitted) > REPORTED_WINDOWS:
                self._report(f"{self.name}: rereads {counted(missing, 'sample')} to get to where the run is")
        while self._reader.position.emitted < emitted:
            self._reader.advance()
        return self._reader

    # ---- position ----

    def advance(self, step: int, samples: int) -> None:
        """Advance to the end of `step`, and keep the position."""
        with self._lock:
            self._positions[step] = self._reader_at(samples).position
            kept = sorted(known for known in self._positions if known <= step)[-KEPT_STEPS:]
            self._positions = {known: self._positions[known] for known in kept}

    def state(self, step: int, samples: int) -> Callable[[], bytes] | None:
        """Return the state at the end of `step`."""
        with self._lock:  # if the stage of `step` does not read the stream, the state after the last step that did
            last = max((known for known in self._positions if known <= step), default=step)
            position = self._positions.get(last)
        if position is None or position.emitted != samples:
            return None
        return partial(to_bytes, position, self._facts)

    def restore(self, step: int, samples: int, state: bytes, where: str) -> None:
        """Continue from `state`."""
        position = from_bytes(state, self._facts, where)
        if position.emitted != samples:
            raise InputError(f"{where}: expected a stream after {samples:,} samples, found {position.emitted:,}")
        with self._lock:
            self._reader = StreamReader(self.rules, position)
            self._positions[step] = position

    def describe(self) -> str:
        """Return files, order and reader shards, for the console."""
        buffer, parts = self.rules.shuffle_buffer, counted(self.texts.parts, "file")
        order = f"shuffled over {buffer:,} documents" if buffer > 1 else "in their order"
        held = counted(len(self.to_validate_on), "sample")
        shards = counted(self.rules.shards, "reader shard")
        return f"{self.name}: streamed from {parts}, {order}, {shards}; held out for validation: {held}"


class DocumentEncoder:
    """Encodes documents with the rules of the cached mode, in bounded memory; ids of known words are cached."""

    def __init__(self, name: str, tokenizer: TextTokenizer, rules: EncodeRules, vocab_size: int) -> None:
        self.name, self.tokenizer, self.rules, self.vocab_size = name, tokenizer, rules, vocab_size
        adds_nothing = tokenizer.backend.num_special_tokens_to_add(False) == 0
        self.words = CachedBPE.of(tokenizer.backend) if adds_nothing else None
        self._lock = threading.Lock()  # threads share the dict of cached words

    def __call__(self, documents: Sequence[Sequence[str]]) -> tuple[NDArray[np.uint32], Int64]:
        """Return concatenated ids ``[tokens]``, and the number of ids of each document ``[documents]``."""
        pieces = list(chain.from_iterable(documents))
        sizes = np.array([len(document) for document in documents])
        last = np.cumsum(sizes) - 1
        starts, ends = np.zeros(len(pieces), dtype=np.bool_), np.zeros(len(pieces), dtype=np.bool_)
        starts[last - sizes + 1], ends[last] = True, True
        with self._lock:
            ids, lengths, *_ = encode_chunks(self._encode, pieces, starts.tolist(), ends.tolist(), self.rules)
        check_ids(self.name, int(ids.max(initial=0)), self.tokenizer, self.vocab_size)
        return ids, np.add.reduceat(lengths, last - sizes + 1)

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        for text in texts:
            if len(text) > LONGEST_TEXT:
                raise InputError(
                    f"{self.name}: a document of {len(text):,} characters, {text[:40]!r}…, which is encoded at once; "
                    f"expected at most {LONGEST_TEXT:,} while streaming: split it"
                )
        return self.words.encode(texts) if self.words else library_ids(self.tokenizer.backend, texts, special)


def check_ids(name: str, largest: int, tokenizer: TextTokenizer, vocab_size: int) -> None:
    """Raise InputError if the `largest` id is not a row of the embedding."""
    if largest >= vocab_size:
        raise InputError(
            f"{name}: token {largest} is not below model.model_config.vocab_size = {vocab_size}; "
            f"the tokenizer {tokenizer.name} needs {tokenizer.vocab_size}"
        )


def all_documents(texts: StreamableDocuments) -> Iterator[DocumentChunk]:
    """Yield every piece of a stream, in the order of its files."""
    return chain.from_iterable(texts.chunks_from(part, 0) for part in range(texts.parts))


def first_held_out(
    texts: StreamableDocuments, encode: DocumentEncoder, val_fraction: float, tokens: int
) -> SplitTokens:
    """Return the first held-out documents of the stream, in the order of its files, with at least `tokens` tokens.

    If there are fewer tokens, return all held-out documents.
    """
    found: list[NDArray[np.uint32]] = []
    size = 0
    waiting: list[str] = []
    separate = encode.rules.max_tokens is not None
    for piece in assign_sides(all_documents(texts), threshold_of_fraction(val_fraction), separate=separate):
        if not piece.held_out:
            continue
        waiting.append(piece.text)
        if not piece.ends:
            continue
        found.append(encode([waiting])[0])
        size += sum(len(text.encode()) for text in waiting)
        waiting = []
        if sum(map(len, found)) >= tokens:
            break
    ids = np.concatenate([np.empty(0, dtype=np.uint32), *found])
    ends = np.cumsum(np.array([len(each) for each in found], dtype=np.uint64), dtype=np.uint64)
    largest = int(ids.max()) if len(ids) else -1
    return SplitTokens(Path(texts.name), "cache", ids, ends, bytes=size, max_id=largest)


def cached_first_held_out(
    texts: StreamableDocuments, encode: DocumentEncoder, val_fraction: float, tokens: int, report: Report
) -> SplitTokens:
    """Return `first_held_out` from the token cache.

    One of the ranks that share a cache reads the start of the stream while the others wait, and a resumed run reads
    nothing. Files that have just changed are read by every rank.
    """
    signature = texts.signature()
    if signature is None:
        return first_held_out(texts, encode, val_fraction, tokens)
    rules = f"{encode.rules.eos} {encode.rules.max_tokens} {encode.vocab_size} {val_fraction!r} {tokens}"
    recipe = f"start of a stream 1 {signature} {encode.tokenizer.hash} {rules}"
    path = cache_entry("tokens", recipe)

    def build(folder: Path) -> None:
        split = first_held_out(texts, encode, val_fraction, tokens)
        np.save(folder / "validation.npy", split.tokens)
        np.save(folder / "ends.npy", split.ends)
        (folder / "meta.json").write_text(json.dumps({"bytes": split.bytes, "max_id": split.max_id}))

    cached_folder(path, build, report, f"reading the documents of {texts.name} to validate on")
    try:
        meta = json.loads((path / "meta.json").read_text())
        ids, ends = (np.load(path / name, mmap_mode="r") for name in ("validation.npy", "ends.npy"))
    except (OSError, ValueError, EOFError):
        raise InputError(f"{path}: damaged token cache; delete it to have it rebuilt") from None
    return SplitTokens(path, "cache", ids, ends, bytes=meta["bytes"], max_id=meta["max_id"])


def open_stream(
    texts: StreamableDocuments, tokenizer: TextTokenizer, rules: EncodeRules, settings: Streaming, opening: Opening
) -> Stream:
    """Open a stream. Held-out documents are read only for the first stage of a run that validates.

    Raises InputError if there are more reader shards than files, or the number of validation samples is not set.
    """
    run, length = opening.run, opening.sequence_length
    stream = opening.opened
    if not isinstance(stream, Stream):
        if settings.reader_shards > texts.parts:
            raise InputError(
                f"dataset.streaming.reader_shards: expected at most one reader shard per file; found "
                f"{settings.reader_shards} for the {counted(texts.parts, 'file')} of {texts.name}"
            )
        encode = DocumentEncoder(texts.name, tokenizer, rules, run.vocab_size)
        read_by = ShardRules(
            texts=texts,
            encode=encode,
            sequence_length=length,
            seed=opening.order_key,
            shuffle_buffer=settings.shuffle_buffer,
            shards=settings.reader_shards,
            val_fraction=run.val_fraction,
            single_pieces=rules.max_tokens is not None,
            chosen=opening.reserved,
        )
        stream = Stream(read_by, encode, run.report)
    if run.validates and opening.first_stage:
        if run.validation_samples is None:
            raise InputError(
                f"tokens.val_samples: expected a number for the stream {texts.name}, whose held-out documents are not "
                "counted: set it, or tokens.limit_val_batches above 0"
            )
        tokens = run.validation_samples * length + 1
        split = cached_first_held_out(texts, stream.encode, run.val_fraction, tokens, run.report)
        stream.to_validate_on = HeldOutWindows(texts.name, split, length)
    return stream
