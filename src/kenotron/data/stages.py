"""An open stage: its sources, tokenized and mapped, and the order that reads them.

plan.Stage ──open_stage──▶ OpenStage ──read(positions)──▶ TokenBatch
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from kenotron.config.errors import InputError

from .batch import Int64, TokenBatch, TokenSource, make_batch
from .cache import TokenCache, open_tokens
from .encode import EncodeRules
from .order import Order
from .packing import PackedRows, packed_rows
from .plan import SourcePlan, Stage, kind, texts_of
from .progress import Report
from .sources import Part, RandomTokens, TokenWindows, UserSource, held_out_samples, user_object
from .token_folder import TokenFolder, TokenPath, check_fit, first_length, open_folder, open_samples, training_samples
from .tokenizer import Tokenizer, end_of_text
from .validation import HeldOutWindows

RANDOM_HELD_OUT = 1024
"""Samples of validation where the data are random."""


@dataclass(frozen=True)
class OpenSource:
    """A source ready to be read: its training and held-out samples, and the cache or the files they lie in."""

    train: TokenSource
    held_out: TokenSource
    cache: TokenCache | None = None
    folder: TokenFolder | None = None

    def content(self) -> str | None:
        """A key that other data change; None where the data have no name by content (random, a user's own)."""
        content = self.folder.content if self.folder is not None else self.cache.content if self.cache else None
        return content if self.packed is None or content is None else f"{content} best_fit"

    @property
    def packed(self) -> PackedRows | None:
        """The rows of whole documents that are trained on; None where it is windows."""
        whole = self.train.whole if isinstance(self.train, Part) else self.train
        return whole if isinstance(whole, PackedRows) else None

    def describe(self) -> str:
        """One line for the console."""
        packing = f"; {self.packed.plan.describe(self.packed.sequence_length)}" if self.packed else ""
        if self.cache is None:
            samples = f"{len(self.train):,} samples, {len(self.held_out):,} held out{packing}"
            return f"{self.train.name}: {f'{self.folder.describe()}, ' if self.folder else ''}{samples}"
        train, held = self.cache.train, self.cache.validation
        skipped = f", {self.cache.skipped} files left out as no UTF-8" if self.cache.skipped else ""
        rule = " (the one with the smallest hash: none below tokens.val_fraction)" if self.cache.smallest_hash else ""
        return (
            f"{self.train.name}: {len(train.ends):,} documents, {len(train.tokens):,} tokens, {train.bytes:,} bytes, "
            f"{len(self.train):,} samples{packing}; held out: {len(held.ends):,} documents, "
            f"{len(held.tokens):,} tokens, {held.bytes:,} bytes{rule}{skipped}; cache: {self.cache.path}"
        )


@dataclass(frozen=True)
class OpenStage:
    """A stage ready to be read."""

    stage: Stage
    sources: list[OpenSource]
    order: Order

    def read(self, positions: Int64, sample_ids: Int64, document_masking: bool) -> TokenBatch:
        """The samples at `positions` ``[n]`` of the stage, as one batch of n sequences."""
        source_of, index = self.order.locate(positions)
        if len(self.sources) == 1:
            source = self.sources[0].train
            documents = source.documents(index) if document_masking else None
            return make_batch(source.samples(index), sample_ids, documents, source.loss(index))
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


def open_stage(
    config: Any,
    stage: Stage,
    tokenizer: Tokenizer | None,
    report: Report,
    stop: threading.Event | None = None,
) -> OpenStage:
    """Open every source of a stage; what is not cached is tokenized, unless `stop` is set meanwhile."""
    sources = [open_source(config, stage, planned, tokenizer, report, stop) for planned in stage.sources]
    for source in sources:
        if not len(source.train):
            raise InputError(too_small(source, stage.sequence_length))
    order = Order(
        [len(source.train) for source in sources],
        [planned.weight for planned in stage.sources],
        [planned.key for planned in stage.sources],
        [planned.offset for planned in stage.sources],
    )
    return OpenStage(stage, sources, order)


def open_source(
    config: Any,
    stage: Stage,
    planned: SourcePlan,
    tokenizer: Tokenizer | None,
    report: Report,
    stop: threading.Event | None = None,
) -> OpenSource:
    """Open one source."""
    vocab_size, length = config.model.architecture.vocab_size, stage.sequence_length
    eos = end_of_text(tokenizer, config.model.architecture)
    padding = eos if 0 <= eos < vocab_size else 0
    texts = texts_of(planned.dataset)
    if texts is not None:
        if tokenizer is None:
            raise InputError(f"{texts.name} is text, but the run has no tokenizer")
        cache = open_tokens(
            texts,
            tokenizer,
            EncodeRules(eos, config.tokenizer.tokenizer_max_length),
            config.tokens.val_fraction,
            getattr(planned.dataset, "dataset_processing_num_proc_per_process", 1),
            getattr(planned.dataset, "dataset_overwrite_cache", False),
            report,
            stop,
        )
        check_ids(texts.name, cache, vocab_size, tokenizer)
        if planned.dataset.packing == "best_fit":
            train: TokenSource = packed_rows(texts.name, [cache.train], length, padding, report)
        else:
            train = TokenWindows(texts.name, cache.train, length)
        return OpenSource(train, HeldOutWindows(texts.name, cache.validation, length), cache)
    fraction = config.tokens.val_fraction
    if isinstance(planned.dataset, TokenPath):
        folder = open_folder(planned.dataset, length, vocab_size, config.general.seed)
        check_fit(folder, planned.dataset, config, tokenizer, report)
        samples = open_samples(folder, planned.dataset, padding, report)
        if config.tokens.validates and isinstance(samples, PackedRows) and length != first_length(config):
            report(
                f"warning: {folder.name}: rows of {length} tokens are packed anew, so that this stage also trains on "
                f"documents that the first stage, with another sequence length, holds out of the same files"
            )
        last, border = training_samples(samples, planned.dataset, config)
        return OpenSource(Part(samples, 0, last), Part(samples, border, len(samples)), folder=folder)
    if kind(planned.dataset) == "null":
        whole: RandomTokens | UserSource = RandomTokens(vocab_size, length, stage.seed)
        held = RANDOM_HELD_OUT
    else:
        path = planned.dataset.source
        items = user_object(path, dict(planned.dataset.kwargs), length, stage.seed)
        whole = UserSource(path, items, length, vocab_size)
        held = held_out_samples(len(whole), fraction)
    border = len(whole) - held
    return OpenSource(Part(whole, 0, border), Part(whole, border, len(whole)))


def too_small(source: OpenSource, sequence_length: int) -> str:
    """What to say of a source without a single training sample."""
    line = f"{source.train.name}: expected at least {sequence_length + 1} tokens to train on (sequence_length + 1), "
    if source.folder is not None:
        held = len(source.held_out)
        return line + f"found {source.folder.describe()}" + (f" (and {held} sample held out)" if held else "")
    if source.cache is None:
        return line + "found no sample"
    held = len(source.cache.validation.ends)
    line += f"found {len(source.cache.train.tokens):,} in {len(source.cache.train.ends):,} documents"
    return line + (f" (and {held:,} documents held out by tokens.val_fraction)" if held else "")


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
