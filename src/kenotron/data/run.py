"""The data of one run: stages, batches, validation.

    with open_run(config) as data:
        for step, batches in enumerate(data.loader(start_step=1), start=1):     # resume: start_step=1001
            for batch in batches: ...                                           # this rank's micro-batches

Step t (from 1) of a stage that starts at step s takes samples ``(t - s) * G ... (t - s) * G + G - 1`` of that stage,
G the global batch size. Sample j of the global batch goes to micro-batch m and data-parallel rank r, row k, with

    j = (m * dp_size + r) * micro_batch_size + k

so the set of samples of a step never depends on the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kenotron.config.errors import InputError

from .batch import Int64, TokenBatch, TokenSource, make_batch
from .cache import TokenCache, open_tokens
from .encode import EncodeRules
from .loader import Prefetcher
from .order import Order
from .plan import SourcePlan, Stage, kind, plan_stages, texts_of
from .progress import Report
from .sources import Part, RandomTokens, TokenWindows, UserSource, user_object
from .tokenizer import Tokenizer
from .trained import tokenizer_of
from .validation import BASELINE_LIMIT, HeldOut, HeldOutWindows, compression_baselines, held_out_texts


@dataclass(frozen=True)
class OpenSource:
    """A source ready to be read: its training and held-out samples, and its cache if it has one."""

    train: TokenSource
    held_out: TokenSource
    cache: TokenCache | None


@dataclass(frozen=True)
class OpenStage:
    """A stage ready to be read."""

    stage: Stage
    sources: list[OpenSource]
    order: Order


class RunData:
    """See the module. Made by `open_run`; `close` it, or use it in a `with`."""

    def __init__(self, config: Any, tokenizer: Tokenizer | None, stages: list[Stage], report: Report) -> None:
        self.config, self.tokenizer, self.stages = config, tokenizer, stages
        self._report = report
        self._pool = ThreadPoolExecutor(1, "kenotron-stage")
        self._open: dict[int, Future[OpenStage]] = {}

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer's vocabulary, or the model's where there is no tokenizer."""
        return self.tokenizer.vocab_size if self.tokenizer else self.config.model.architecture.vocab_size

    # ---- training ----

    def loader(
        self, start_step: int = 1, stop_step: int | None = None, dp_rank: int = 0, dp_size: int = 1
    ) -> Prefetcher[list[TokenBatch]]:
        """Micro-batches of the steps [start_step, stop_step), made ahead by `num_loading_workers` threads."""
        stop = self.config.tokens.train_steps + 1 if stop_step is None else stop_step
        workers = self.stage_at(start_step).workers if start_step < stop else 0
        return Prefetcher(lambda step: self.batch(step, dp_rank, dp_size), start_step, stop, workers)

    def batch(self, step: int, dp_rank: int = 0, dp_size: int = 1) -> list[TokenBatch]:
        """The micro-batches of one rank at `step` (from 1)."""
        opened = self._ready(self.stage_at(step).number)
        micro, total = self.config.tokens.micro_batch_size, self.config.global_batch_size
        if total % (micro * dp_size):
            raise InputError(
                f"the global batch of {total} samples does not divide into micro-batches of {micro} "
                f"on {dp_size} data-parallel ranks"
            )
        in_batch = np.arange(total, dtype=np.int64).reshape(-1, dp_size, micro)[:, dp_rank].reshape(-1)
        positions = (step - opened.stage.start) * total + in_batch
        masking = getattr(self.config.model, "document_masking", False)
        whole = read(opened, positions, (step - 1) * total + in_batch, masking)
        return [_rows(whole, first, first + micro) for first in range(0, len(positions), micro)]

    def stage_at(self, step: int) -> Stage:
        """The stage that `step` belongs to."""
        for stage in self.stages:
            if stage.start <= step < stage.stop:
                return stage
        raise InputError(f"step {step} is not in the run: its steps are 1 to {self.config.tokens.train_steps}")

    # ---- validation ----

    def validation(self, dp_rank: int = 0, dp_size: int = 1) -> Iterator[tuple[TokenBatch, float]]:
        """This rank's held-out batches, each with the UTF-8 bytes of its labels (0.0: unknown).

        Those of the first stage, at every step of the run, so that its numbers compare.
        Errors (InputError): no document is held out.
        """
        held_out = self.held_out()
        if not len(held_out):
            raise InputError(
                "no document is left for validation: give more documents or raise tokens.val_fraction "
                f"(now {self.config.tokens.val_fraction})"
            )
        return held_out.batches(self._limit(), self.config.tokens.micro_batch_size, dp_rank, dp_size)

    def held_out(self) -> HeldOut:
        """The held-out samples of the first stage."""
        opened = self._ready(0)
        sources = [source for source in opened.sources if len(source.held_out)]
        per_token: list[float | None] = []
        for source in sources:
            split = source.cache.validation if source.cache else None
            per_token.append(split.bytes / len(split.tokens) if split else None)
        table = self.tokenizer.token_bytes() if self.tokenizer else None
        if table is not None:
            table = np.pad(table, (0, max(0, self.config.model.architecture.vocab_size - len(table))))
            eos = end_of_document(self.config, self.tokenizer)
            table[eos] = 0
        masking = getattr(self.config.model, "document_masking", False)
        held = [source.held_out for source in sources]
        return HeldOut(held, opened.stage.sequence_length, table, per_token, masking)

    def validation_texts(self) -> Iterator[str]:
        """The held-out documents of the first stage as text."""
        for source in self.stages[0].sources:
            if (texts := texts_of(source.dataset)) is not None:
                yield from held_out_texts(texts.documents(), self.config.tokens.val_fraction)

    def compression_baselines(self) -> dict[str, float]:
        """Bits per byte of gzip and xz on the very text that `validation` reads; {} where it reads no text, only a
        part of it, or more than can be squeezed in a minute."""
        caches = [source.cache for source in self._ready(0).sources]
        held_out = self.held_out()
        limit = self._limit()
        if None in caches or (limit is not None and limit < len(held_out)):
            return {}
        if sum(cache.validation.bytes for cache in caches if cache) > BASELINE_LIMIT:
            return {}
        return compression_baselines(self.validation_texts())

    def _limit(self) -> int | None:
        tokens = self.config.tokens
        limits = [tokens.limit_val_batches * self.config.global_batch_size, tokens.val_samples]
        return min((limit for limit in limits if limit is not None and limit > 0), default=None)

    # ---- stages ----

    def describe(self) -> list[str]:
        """What is read, for the console."""
        lines = [f"tokenizer: {describe_tokenizer(self.config, self.tokenizer)}"]
        for stage in self.stages:
            future = self._open.get(stage.number)
            head = f"[{stage.name}] steps {stage.start}-{stage.stop - 1}, sequence length {stage.sequence_length}"
            if future is None or not future.done():
                lines.append(f"{head}: opened when its turn comes")
                continue
            total = sum(source.weight for source in stage.sources)
            for planned, source in zip(stage.sources, future.result().sources):
                lines.append(f"{head}: {planned.weight / total:.2%} {describe_source(source)}")
        return lines

    def close(self) -> None:
        """Stop the background thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> RunData:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ready(self, number: int) -> OpenStage:
        """The open stage `number`; the next one is being opened from now on, and its errors come out at once."""
        upcoming = number + 1
        opened = self._start(number)
        if upcoming < len(self.stages) and self.stages[upcoming].steps:
            following = self._start(upcoming)
            if following.done() and (error := following.exception()):
                raise error
        return opened.result()

    def _start(self, number: int) -> Future[OpenStage]:
        if number not in self._open:
            stage = self.stages[number]
            self._open[number] = self._pool.submit(open_stage, self.config, stage, self.tokenizer, self._report)
        return self._open[number]


def open_run(config: Any, start_step: int = 1, report: Report = print) -> RunData:
    """Open the data of a run at `start_step`: tokenizer, then the stage of that step; the next one in the background.

    `report` gets one line of text at a time. Errors (InputError): whatever is wrong with the data, in one line.
    """
    stages = plan_stages(config)
    data = RunData(config, tokenizer_of(config, stages, report), stages, report)
    try:
        data._ready(data.stage_at(min(start_step, config.tokens.train_steps)).number)
    except BaseException:
        data.close()
        raise
    return data


def open_stage(config: Any, stage: Stage, tokenizer: Tokenizer | None, report: Report) -> OpenStage:
    """Open every source of a stage; tokenizes what is not cached."""
    sources = [open_source(config, stage, planned, tokenizer, report) for planned in stage.sources]
    for source in sources:
        if not len(source.train):
            documents = f" in {len(source.cache.train.ends):,} documents" if source.cache else ""
            tokens = f"{len(source.cache.train.tokens):,} tokens{documents}" if source.cache else "nothing"
            raise InputError(
                f"{source.train.name}: smaller than one sample: expected at least {stage.sequence_length + 1} "
                f"tokens (sequence_length + 1), found {tokens}"
            )
    order = Order(
        [len(source.train) for source in sources],
        [planned.weight for planned in stage.sources],
        [planned.key for planned in stage.sources],
        stage.offsets,
    )
    return OpenStage(stage, sources, order)


def open_source(
    config: Any, stage: Stage, planned: SourcePlan, tokenizer: Tokenizer | None, report: Report
) -> OpenSource:
    """Open one source."""
    vocab_size = config.model.architecture.vocab_size
    texts = texts_of(planned.dataset)
    if texts is not None and tokenizer is not None:
        cache = open_tokens(
            texts,
            tokenizer,
            EncodeRules(end_of_document(config, tokenizer), config.tokenizer.tokenizer_max_length),
            config.tokens.val_fraction,
            getattr(planned.dataset, "dataset_processing_num_proc_per_process", 1),
            getattr(planned.dataset, "dataset_overwrite_cache", False),
            report,
        )
        check_ids(texts.name, cache, vocab_size, tokenizer)
        train = TokenWindows(texts.name, cache.train, stage.sequence_length)
        return OpenSource(train, HeldOutWindows(texts.name, cache.validation, stage.sequence_length), cache)
    if kind(planned.dataset) == "null":
        whole: RandomTokens | UserSource = RandomTokens(vocab_size, stage.sequence_length, stage.seed)
        held = min(len(whole) // 2, 1024)
    else:
        path = planned.dataset.source
        items = user_object(path, dict(planned.dataset.kwargs), stage.sequence_length, stage.seed)
        whole = UserSource(path, items, stage.sequence_length, vocab_size)
        held = int(len(whole) * config.tokens.val_fraction)
    cut = len(whole) - held
    return OpenSource(Part(whole, 0, cut), Part(whole, cut, len(whole)), None)


def check_ids(name: str, cache: TokenCache, vocab_size: int, tokenizer: Tokenizer) -> None:
    """Every id must be a row of the embedding."""
    largest = max(cache.train.max_id, cache.validation.max_id)
    if largest >= vocab_size:
        raise InputError(
            f"{name}: token {largest} is not below model.model_config.vocab_size = {vocab_size}; "
            f"the tokenizer {tokenizer.name} needs at least {tokenizer.vocab_size}"
        )


def end_of_document(config: Any, tokenizer: Tokenizer | None) -> int:
    """The id put after every document: the tokenizer's, else the model config's."""
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return config.model.architecture.eos_token_id


def read(opened: OpenStage, positions: Int64, sample_ids: Int64, document_masking: bool) -> TokenBatch:
    """The samples at `positions` ``[n]`` of a stage, as one batch of n sequences."""
    source_of, index = opened.order.locate(positions)
    if len(opened.sources) == 1:
        source = opened.sources[0].train
        return make_batch(source.samples(index), sample_ids, source.documents(index) if document_masking else None)
    width = opened.stage.sequence_length + 1
    windows = np.empty((len(positions), width), dtype=np.int64)
    documents = np.zeros_like(windows) if document_masking else None
    for number in np.unique(source_of):
        where = np.flatnonzero(source_of == number)
        source = opened.sources[number].train
        windows[where] = source.samples(index[where])
        if documents is not None and (found := source.documents(index[where])) is not None:
            documents[where] = found
    return make_batch(windows, sample_ids, documents)


def _rows(batch: TokenBatch, start: int, stop: int) -> TokenBatch:
    return TokenBatch(
        batch.tokens[start:stop],
        batch.labels[start:stop],
        batch.sample_ids[start:stop],
        None if batch.positions is None else batch.positions[start:stop],
        None if batch.documents is None else batch.documents[start:stop],
    )


# ---- lines for the console ---------------------------------------------------------------------------------


def describe_tokenizer(config: Any, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return "none (the data are tokens already)"
    eos = end_of_document(config, tokenizer)
    origin = "the tokenizer's" if tokenizer.eos_token_id is not None else "model_config.eos_token_id, as it has none"
    level = "byte-level, " if tokenizer.is_byte_level else ""
    return f"{tokenizer.name} ({level}{tokenizer.vocab_size:,} entries); documents end with token {eos} ({origin})"


def describe_source(source: OpenSource) -> str:
    cache = source.cache
    if cache is None:
        return f"{source.train.name}: {len(source.train):,} samples, {len(source.held_out):,} held out"
    train, held = cache.train, cache.validation
    skipped = f", {cache.skipped} files that are no UTF-8 left out" if cache.skipped else ""
    return (
        f"{source.train.name}: {len(train.ends):,} documents, {len(train.tokens):,} tokens, {train.bytes:,} bytes, "
        f"{len(source.train):,} samples; held out: {len(held.ends):,} documents, {len(held.tokens):,} tokens, "
        f"{held.bytes:,} bytes{skipped}; cache: {cache.path}"
    )
