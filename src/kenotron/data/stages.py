"""An open stage: its sources, tokenized and mapped, and the order that reads them.

plan.Stage ──open_stage──▶ OpenStage ──read(positions)──▶ TokenBatch

How a stage mixes its sources depends on what the stages before it have drawn of them, and on the lengths of those with
a limit, or with a weight by their size. `Sources` looks at no more than that takes: most runs open one stage and
the next.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from kenotron.config.errors import InputError, counted

from .batch import Int64, TokenBatch, TokenSource, make_batch
from .cache import SplitTokens, TokenCache, chosen_hash, open_tokens
from .encode import EncodeRules
from .order import Mixing, Order
from .packing import PackedRows, packed_rows
from .plan import TEXT_KINDS, SourcePlan, Stage, has_answers, kind, streams, texts_of, whole_keys
from .progress import Report
from .sources import Part, RandomTokens, TokenWindows, UserSource, held_out_samples, user_object
from .stream import Stream, first_held_out
from .texts import StreamTexts
from .token_folder import TokenFolder, check_apart, check_fit, open_folder, split_samples
from .token_paths import TokenPath
from .tokenizer import Tokenizer, end_of_text
from .validation import HeldOutWindows

RANDOM_HELD_OUT = 1024
"""Samples of validation where the data are random."""


@dataclass(frozen=True)
class OpenSource:
    """A source ready to be read: its training and held-out samples, and the cache or the files they lie in, or their
    stream.
    """

    train: TokenSource
    held_out: TokenSource
    cache: TokenCache | None = None
    folder: TokenFolder | None = None
    stream: Stream | None = None

    def content(self) -> str | None:
        """A key that other data change; None where the data have no name by content (random, a user's own)."""
        if self.stream is not None:
            return self.stream.texts.fingerprint(times=True)
        content = self.folder.content if self.folder is not None else self.cache.content if self.cache else None
        return content if self.packed is None or content is None else f"{content} best_fit"

    @property
    def packed(self) -> PackedRows | None:
        """The rows of whole documents that are trained on; None where it is windows."""
        whole = self.train.whole if isinstance(self.train, Part) else self.train
        return whole if isinstance(whole, PackedRows) else None

    @property
    def held_out_text(self) -> SplitTokens | None:
        """The tokens of held-out text, with its bytes; None where there are no texts."""
        if self.cache is not None:
            return self.cache.validation
        return self.held_out.split if isinstance(self.held_out, HeldOutWindows) else None

    def measure(self, unit: str) -> int:
        """What is trained on, in samples ("tokens": all have the same number), or its bytes ("size").

        Error (InputError): what nobody knows, a size or how long a stream is.
        """
        if self.stream is not None:
            raise InputError(f"dataset.weight: {unit}: how much there is of the stream {self.train.name} is not known")
        if unit == "tokens":
            return len(self.train)
        if self.cache is not None:
            return self.cache.train.bytes
        if self.folder is not None:
            return sum(len(file.tokens) * file.tokens.itemsize for file in self.folder.files)
        raise InputError(f"dataset.weight: size: {self.train.name} has no size in bytes; give it a number, or tokens")

    @property
    def fetches_ahead(self) -> bool:
        """Whether files on other machines are read."""
        return self.folder is not None and self.folder.is_remote

    def describe(self) -> str:
        """One line for the console."""
        if self.stream is not None:
            return f"{self.stream.describe()}; held out for validation: {counted(len(self.held_out), 'sample')}"
        packing = f"; {self.packed.plan.describe(self.packed.sequence_length)}" if self.packed else ""
        if self.cache is None:
            samples = f"{counted(len(self.train), 'sample')}, {len(self.held_out):,} held out{packing}"
            return f"{self.train.name}: {f'{self.folder.describe()}, ' if self.folder else ''}{samples}"
        train, held = self.cache.train, self.cache.validation
        noun, reason = ("file", "as no UTF-8") if train.loss is None else ("row", "without an answer")
        skipped = f", {counted(self.cache.skipped, noun)} left out {reason}" if self.cache.skipped else ""
        learnt = "" if train.loss is None else f" ({np.count_nonzero(train.loss):,} learnt)"
        rule = " (the one with the smallest hash: none below tokens.val_fraction)" if self.cache.smallest_hash else ""
        return (
            f"{self.train.name}: {counted(len(train.ends), 'document')}, {len(train.tokens):,} tokens{learnt}, "
            f"{train.bytes:,} bytes, "
            f"{counted(len(self.train), 'sample')}{packing}; held out: {counted(len(held.ends), 'document')}, "
            f"{len(held.tokens):,} tokens, {held.bytes:,} bytes{rule}{skipped}; cache: {self.cache.path}"
        )


@dataclass(frozen=True)
class OpenStage:
    """A stage ready to be read."""

    stage: Stage
    sources: list[OpenSource]
    order: Order

    def draws(self, positions: Int64, source: int) -> Int64:
        """The indices of those samples at `positions` that are of this source."""
        source_of, index = self.order.locate(positions)
        return index[source_of == source]

    @property
    def stop(self) -> int:
        """The first step that is not of the stage, or that its sources cannot fill."""
        end = self.order.mixing.end
        return self.stage.stop if end is None else min(self.stage.stop, self.stage.step_of(end))

    def fetch_ahead(self, positions: Int64) -> list[Future[bytes]]:
        """Begin to fetch what `read` will need of files on other machines."""
        remote = [(number, source) for number, source in enumerate(self.sources) if source.fetches_ahead]
        if not remote:
            return []
        source_of, index = self.order.locate(positions)
        read = [(source.packed or source.folder, index[source_of == number]) for number, source in remote]
        return [future for files, indices in read if files is not None for future in files.fetch_ahead(indices)]

    @cached_property
    def _joined(self) -> tuple[TokenSource, Int64] | None:
        """What can be read as one source, and where the samples of each source ``[sources]`` begin in it: one source
        alone, or windows of tokenized files. None: the sources are read one after the other."""
        if len(self.sources) == 1:
            return self.sources[0].train, np.zeros(1, dtype=np.int64)
        folders = [source.folder for source in self.sources if source.folder is not None and source.packed is None]
        whole = TokenFolder.join(folders) if len(folders) == len(self.sources) else None
        if whole is None:
            return None
        before = np.cumsum([0, *map(len, folders[:-1])])
        return whole, before + [cast(Part, source.train).start for source in self.sources]

    def read(self, positions: Int64, sample_ids: Int64, document_masking: bool) -> TokenBatch:
        """The samples at `positions` ``[n]`` of the stage, as one batch of n sequences."""
        source_of, index = self.order.locate(positions)
        if self._joined is not None:
            whole, first = self._joined
            index = index + first[source_of]
            documents = whole.documents(index) if document_masking else None
            return make_batch(whole.samples(index), sample_ids, documents, whole.loss(index))
        parts = [(self.sources[s].train, np.flatnonzero(source_of == s)) for s in sorted(set(source_of.tolist()))]
        drawn = [source.samples(index[where]) for source, where in parts]
        types = {rows.dtype for rows in drawn}
        shape = (len(positions), self.stage.sequence_length + 1)
        windows = np.empty(shape, types.pop() if len(types) == 1 else np.int64)  # the narrower, the less memory moves
        numbers = np.zeros(shape, dtype=np.int64) if document_masking else None
        loss = None
        for (source, where), rows in zip(parts, drawn):
            windows[where] = rows
            if numbers is not None and (found := source.documents(index[where])) is not None:
                numbers[where] = found
            if (carries := source.loss(index[where])) is not None:
                loss = np.ones(shape, dtype=np.bool_) if loss is None else loss
                loss[where] = carries
        return make_batch(windows, sample_ids, numbers, loss)


class Sources:
    """The sources of a run's stages, each opened when it is asked for, and how every stage mixes them.

    What is not cached is tokenized, unless `stop` is set meanwhile. Any thread may ask.
    """

    def __init__(
        self,
        config: Any,
        stages: Sequence[Stage],
        tokenizer: Tokenizer | None,
        report: Report,
        stop: threading.Event | None = None,
    ) -> None:
        self.stages = stages
        self._how = (tokenizer, report, stop)
        self._config, self._lock = config, threading.RLock()
        self._open: dict[tuple[int, int], OpenSource] = {}
        self._streams: dict[int, Stream] = {}
        self._mixings: dict[int, Mixing] = {}

    def source(self, stage: Stage, number: int) -> OpenSource:
        """Source `number` of a stage.

        Errors (InputError): whatever is wrong with it; not one sample.
        """
        place = stage.number, number
        if place in self._open:  # without waiting for what another thread opens
            return self._open[place]
        with self._lock:
            if place not in self._open:
                planned = stage.sources[number]
                with whole_keys(planned.at):
                    opened = open_source(self._config, stage, planned, *self._how, self.chosen, self._streams)
                if not len(opened.train):
                    raise InputError(too_small(opened, stage.sequence_length))
                self._open[place] = opened
            return self._open[place]

    @cached_property
    def chosen(self) -> frozenset[int]:
        """Hashes of the documents that are validated on because their set is small, and so trained on in no other one.

        In a run with one text there is no other.
        """
        tokens = self._config.tokens
        texts = {s.name: s.dataset for stage in self.stages for s in stage.sources if kind(s.dataset) in TEXT_KINDS}
        if not tokens.validates or len(texts) < 2:
            return frozenset()
        hashes = []
        for source in self.stages[0].sources:
            if source.name in texts and not streams(source.dataset):
                with whole_keys(source.at):
                    kept = texts_of(source.dataset, self._config.remote_data, self._how[0])
                    hashes.append(None if kept is None else chosen_hash(kept, tokens.val_fraction))
        return frozenset(each for each in hashes if each is not None)

    def check_held_out(self, stage: Stage) -> None:
        """Error (InputError): a stage would train on tokens of files that the first one, and so validation, holds out.

        Text is held out by its hash, wherever it stands.
        """
        if not self._config.tokens.validates:
            return
        trained, validated = (
            [
                folder
                for number, planned in enumerate(each.sources)
                if isinstance(planned.dataset, TokenPath) and (folder := self.source(each, number).folder) is not None
            ]
            for each in (stage, self.stages[0])
        )
        check_apart(trained, validated, self._config)

    def mixing(self, stage: Stage) -> Mixing:
        """Which source gives which sample of a stage."""
        if stage.number in self._mixings:
            return self._mixings[stage.number]
        with self._lock:
            numbers = range(len(stage.sources))
            self._mixings[stage.number] = Mixing(
                stage.shares(partial(self._measure, stage)),
                [self._offset(stage, i) for i in numbers],
                [self._limit(stage, i) for i in numbers],
                stage.when_exhausted,
            )
            return self._mixings[stage.number]

    def _measure(self, stage: Stage, number: int, unit: str) -> int:
        with whole_keys(stage.sources[number].at):
            return self.source(stage, number).measure(unit)

    def _offset(self, stage: Stage, number: int) -> int:
        """How many samples the stages before have drawn of a source."""
        name = stage.sources[number].name
        for earlier in reversed(self.stages[: 0 if stage.restart else stage.number]):
            names = [source.name for source in earlier.sources]
            if name in names:
                return self.mixing(earlier).given(earlier.samples)[names.index(name)]
        return 0

    def _limit(self, stage: Stage, number: int) -> int | None:
        epochs = stage.sources[number].max_epochs
        return None if epochs is None else int(Fraction(str(epochs)) * len(self.source(stage, number).train))


def open_stage(sources: Sources, stage: Stage) -> OpenStage:
    """A stage with all of its sources open."""
    opened = [sources.source(stage, number) for number in range(len(stage.sources))]
    sources.check_held_out(stage)
    keys = [planned.key for planned in stage.sources]
    lengths = [None if source.stream else len(source.train) for source in opened]
    return OpenStage(stage, opened, Order(lengths, keys, sources.mixing(stage)))


def open_source(
    config: Any,
    stage: Stage,
    planned: SourcePlan,
    tokenizer: Tokenizer | None,
    report: Report,
    stop: threading.Event | None,
    chosen: frozenset[int],
    known: dict[int, Stream],
) -> OpenSource:
    """Open one source, whose texts with a hash among `chosen` are held out.

    `known` are the run's streams by key: one that comes again is the same one, and goes on.
    """
    vocab_size, length = config.model.architecture.vocab_size, stage.sequence_length
    eos = end_of_text(tokenizer, config.model.architecture)
    padding = eos if 0 <= eos < vocab_size else 0
    texts = texts_of(planned.dataset, config.remote_data, tokenizer)
    if texts is not None:
        if tokenizer is None:
            raise InputError(f"{texts.name} is text, but the run has no tokenizer")
        rules = EncodeRules(eos, config.tokenizer.tokenizer_max_length, examples=has_answers(planned.dataset))
        if streams(planned.dataset):
            return open_stream(
                config, stage, planned, cast(StreamTexts, texts), tokenizer, rules, report, chosen, known
            )
        cache = open_tokens(
            texts,
            tokenizer,
            rules,
            config.tokens.val_fraction,
            getattr(planned.dataset, "dataset_processing_num_proc_per_process", 1),
            getattr(planned.dataset, "dataset_overwrite_cache", False),
            report,
            stop,
            chosen - {chosen_hash(texts, config.tokens.val_fraction)} if chosen else (),
        )
        check_ids(texts.name, cache, vocab_size, tokenizer)
        train: TokenSource = TokenWindows(texts.name, cache.train, length)
        held_out: TokenSource = HeldOutWindows(texts.name, cache.validation, length)
        if planned.dataset.packing == "best_fit":
            sides, keep = [cache.train], not has_answers(planned.dataset)  # the rest of an example has lost its prompt
            train = packed_rows(texts.name, sides, length, padding, report, keep_rest=keep)
            if not keep:
                held_out = packed_rows(texts.name, [cache.validation], length, padding, report, keep_rest=False)
        return OpenSource(train, held_out, cache)
    fraction = config.tokens.val_fraction
    if isinstance(planned.dataset, TokenPath):
        folder = open_folder(planned.dataset, length, vocab_size, config.general.seed, config.remote_data)
        check_fit(folder, planned.dataset, config, tokenizer, report)
        train, held_out = split_samples(folder, planned.dataset, config, padding, report)
        return OpenSource(train, held_out, folder=folder)
    if kind(planned.dataset) == "null":
        whole: RandomTokens | UserSource = RandomTokens(vocab_size, length, stage.seed)
        held = RANDOM_HELD_OUT
    else:
        path = planned.dataset.source
        items = user_object(path, dict(planned.dataset.kwargs), length, stage.seed)
        whole = UserSource(path, items, length, vocab_size, f"{planned.at}.source")
        held = held_out_samples(len(whole), fraction)
    border = len(whole) - held
    return OpenSource(Part(whole, 0, border), Part(whole, border, len(whole)))


def open_stream(
    config: Any,
    stage: Stage,
    planned: SourcePlan,
    texts: StreamTexts,
    tokenizer: Tokenizer,
    rules: EncodeRules,
    report: Report,
    chosen: frozenset[int],
    known: dict[int, Stream],
) -> OpenSource:
    """Open a stream. Held-out documents are read only for the first stage of a run that validates."""
    tokens, settings = config.tokens, planned.dataset.streaming
    stream = known.get(planned.key) or Stream(
        texts,
        tokenizer,
        rules,
        sequence_length=stage.sequence_length,
        vocab_size=config.model.architecture.vocab_size,
        seed=planned.key,
        shuffle_buffer=settings.shuffle_buffer,
        lanes=settings.lanes,
        val_fraction=tokens.val_fraction,
        chosen=chosen,
        report=report,
    )
    known[planned.key] = stream
    wanted = 0
    if tokens.validates and stage.number == 0:
        samples = validation_samples(config)
        if samples is None:
            raise InputError(
                f"tokens.val_samples: how many of the held-out documents of a stream ({texts.name}) are read has to be "
                "said: set it, or tokens.limit_val_batches above 0"
            )
        wanted = samples * stage.sequence_length + 1
    split = first_held_out(texts, stream.encode, tokens.val_fraction, wanted)
    return OpenSource(stream, HeldOutWindows(texts.name, split, stage.sequence_length), stream=stream)


def validation_samples(config: Any) -> int | None:
    """Most held-out samples that one validation reads; None: all."""
    tokens = config.tokens
    limits = [tokens.limit_val_batches * config.global_batch_size, tokens.val_samples]
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def too_small(source: OpenSource, sequence_length: int) -> str:
    """What to say of a source without a single training sample."""
    line = f"{source.train.name}: expected at least {sequence_length + 1} tokens to train on (sequence_length + 1), "
    if source.folder is not None:
        held = len(source.held_out)
        return (
            line + f"found {source.folder.describe()}" + (f" (and {counted(held, 'sample')} held out)" if held else "")
        )
    if source.cache is None:
        return line + "found no sample"
    held = len(source.cache.validation.ends)
    line += f"found {len(source.cache.train.tokens):,} in {counted(len(source.cache.train.ends), 'document')}"
    return line + (f" (and {counted(held, 'document')} held out by tokens.val_fraction)" if held else "")


def check_ids(name: str, cache: TokenCache, vocab_size: int, tokenizer: Tokenizer) -> None:
    """Every id must be a row of the embedding."""
    largest = max(cache.train.max_id, cache.validation.max_id)
    if largest >= vocab_size:
        raise InputError(
            f"{name}: token {largest} is not below model.model_config.vocab_size = {vocab_size}; "
            f"the tokenizer {tokenizer.name} needs {tokenizer.vocab_size}"
        )


def describe_tokenizer(config: Any, tokenizer: Tokenizer | None) -> str:
    """One line for the console: which, how large, and what ends a document."""
    if tokenizer is None:
        return "none (the data are tokens already)"
    origin = "model_config.eos_token_id, as the tokenizer has none" if tokenizer.eos_token_id is None else "its own"
    level = "byte-level, " if tokenizer.is_byte_level else ""
    eos = end_of_text(tokenizer, config.model.architecture)
    return f"{tokenizer.name} ({level}{tokenizer.vocab_size:,} entries); documents end with token {eos} ({origin})"
