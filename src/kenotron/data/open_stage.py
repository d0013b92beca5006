"""An open stage: its sources, tokenized and mapped, and the order in which they are read.

StagePlan ──open_stage──▶ OpenStage ──read(positions)──▶ TokenBatch

How a stage mixes its sources depends on the samples that earlier stages have drawn from them, and on the lengths of
sources with a limit or a weight by size. `Sources` opens only what that requires: most runs open one stage and the
next.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial

import numpy as np

from kenotron.config.errors import InputError
from kenotron.data.batch import Int64, TokenBatch, make_batch
from kenotron.data.order import Mixing, Order
from kenotron.data.source import Opening, RunSettings, TextSpec, TokenSource
from kenotron.data.stage_plan import SourcePlan, StagePlan, complete_keys


@dataclass(frozen=True)
class OpenStage:
    """A stage that is ready to be read."""

    stage: StagePlan
    sources: list[TokenSource]
    order: Order

    @property
    def stop(self) -> int:
        """The first step after the stage, or the first that its sources cannot fill."""
        end = self.order.mixing.end
        return self.stage.stop if end is None else min(self.stage.stop, self.stage.step_of(end))

    @property
    def masks_documents(self) -> bool:
        """Whether a source always masks its documents from each other; then all sources' documents are masked."""
        return any(source.masks_documents for source in self.sources)

    def fetch_ahead(self, positions: Int64) -> list[Future[bytes]]:
        """Start downloading the blocks of remote files that `read` will need."""
        remote = [number for number, source in enumerate(self.sources) if source.is_remote]
        if not remote:
            return []
        source_of, index = self.order.locate(positions)
        return [future for s in remote for future in self.sources[s].fetch_ahead(index[source_of == s])]

    def read(self, positions: Int64, sample_ids: Int64, document_masking: bool) -> TokenBatch:
        """Return the samples at `positions` ``[n]`` of the stage as one batch of n sequences."""
        source_of, index = self.order.locate(positions)
        where = ((s, np.flatnonzero(source_of == s)) for s in sorted(set(source_of.tolist())))
        parts = [(rows, self.sources[s].read(index[rows], document_masking)) for s, rows in where]
        types = {read.tokens.dtype for _, read in parts}
        shape = (len(positions), self.stage.sequence_length + 1)
        tokens = np.empty(shape, types.pop() if len(types) == 1 else np.int64)  # a narrow type moves less memory
        document_ids = loss_mask = None
        for rows, read in parts:
            tokens[rows] = read.tokens
            if document_masking and read.document_ids is not None:
                document_ids = np.zeros(shape, dtype=np.int64) if document_ids is None else document_ids
                document_ids[rows] = read.document_ids
            if read.loss_mask is not None:
                loss_mask = np.ones(shape, dtype=np.bool_) if loss_mask is None else loss_mask
                loss_mask[rows] = read.loss_mask
        return make_batch(tokens, sample_ids, document_ids, loss_mask, source_of)


class Sources:
    """The sources of a run's stages, each opened on first use, and every stage's mixing of them.

    All methods are thread-safe.
    """

    def __init__(self, run: RunSettings, stages: Sequence[StagePlan]) -> None:
        self.run, self.stages = run, stages
        self._lock = threading.RLock()
        self._open: dict[tuple[int, int], TokenSource] = {}
        self._streams: dict[int, TokenSource] = {}
        self._mixings: dict[int, Mixing] = {}

    def source(self, stage: StagePlan, number: int) -> TokenSource:
        """Return source `number` of a stage; a stream that several stages read is one object.

        Raises InputError for invalid data, or a source without a sample.
        """
        place = stage.number, number
        if place in self._open:  # without waiting for a source that another thread opens
            return self._open[place]
        with self._lock:
            if place not in self._open:
                planned = stage.sources[number]
                opened = open_planned(planned, stage, self.run, self.reserved, self._streams.get(planned.key))
                if opened.is_stream:
                    self._streams[planned.key] = opened
                if not len(opened):
                    raise InputError(
                        f"{opened.name}: expected at least {stage.sequence_length + 1} tokens to train on "
                        f"(sequence_length + 1), found {opened.found()}"
                    )
                self._open[place] = opened
            return self._open[place]

    @cached_property
    def chosen(self) -> frozenset[int]:
        """Return hashes of documents that the first stage, or the checkpoint, holds out because their set is small."""
        hashes: set[int | None] = {*self.run.held_out}
        for source in self.stages[0].sources:
            if isinstance(source.spec, TextSpec):
                with complete_keys(source.at):
                    hashes.add(source.spec.reserved_hash(self.run))
        return frozenset(each for each in hashes if each is not None)

    @cached_property
    def reserved(self) -> frozenset[int]:
        """Return `chosen`, which no source trains on; a single source leaves its own out anyway."""
        sources = (source for stage in self.stages for source in stage.sources)
        texts = {(each.name, each.spec.is_stream) for each in sources if isinstance(each.spec, TextSpec)}
        return self.chosen if len(texts) > 1 else self.run.held_out

    def check_held_out(self, stage: StagePlan) -> None:
        """Raise InputError if a stage would train on tokens that the first stage holds out, which validation reads.

        The same path holds the same tokens out in every stage; a folder and a file in it, or the same files in
        another order, do not. Text is held out by its hash, wherever it is.
        """
        if not self.run.validates:
            return
        borders: dict[str, tuple[int, str]] = {}  # file → first held-out token, and the source that holds it out
        for source in self._splitting_files(self.stages[0]):
            for file, _, end in source.training_ends():
                borders[file] = min(borders.get(file, (end, source.name)), (end, source.name))
        for source in self._splitting_files(stage):
            for file, name, end in source.training_ends():
                border, other = borders.get(file, (end, ""))
                if border < end:
                    raise InputError(
                        f"{source.name} would train on tokens of {name} from {border} on, which {other} holds out "
                        "for validation; give the same path, with the same shuffle_files, in both places (each path "
                        "of a list holds out tokens of its own), or leave validation out "
                        "(tokens.val_check_interval: -1)"
                    )

    def _splitting_files(self, stage: StagePlan) -> list[TokenSource]:
        return [self.source(stage, number) for number, each in enumerate(stage.sources) if each.spec.splits_files]

    def mixing(self, stage: StagePlan) -> Mixing:
        """Return the mixing of a stage, which assigns samples to sources."""
        if stage.number in self._mixings:
            return self._mixings[stage.number]
        with self._lock:
            numbers = range(len(stage.sources))
            self._mixings[stage.number] = Mixing(
                stage.shares(partial(self._measure, stage)),
                [self._offset(stage, i) for i in numbers],
                [self._limit(stage, i) for i in numbers],
                stage.data.when_exhausted,
            )
            return self._mixings[stage.number]

    def _measure(self, stage: StagePlan, number: int, unit: str) -> int:
        with complete_keys(stage.sources[number].at):
            return self.source(stage, number).measure(unit)

    def _offset(self, stage: StagePlan, number: int) -> int:
        """Return the number of samples that earlier stages have drawn from a source."""
        name = stage.sources[number].name
        for earlier in reversed(self.stages[: 0 if stage.data.restart else stage.number]):
            names = [source.name for source in earlier.sources]
            if name in names:
                return self.mixing(earlier).drawn(earlier.samples)[names.index(name)]
        return 0

    def _limit(self, stage: StagePlan, number: int) -> int | None:
        epochs = stage.sources[number].max_epochs
        return None if epochs is None else int(Fraction(str(epochs)) * len(self.source(stage, number)))


def open_planned(
    planned: SourcePlan,
    stage: StagePlan,
    run: RunSettings,
    reserved: frozenset[int] = frozenset(),
    opened: TokenSource | None = None,
) -> TokenSource:
    """Open a source as `stage` reads it; for `reserved` and `opened` see `Opening`."""
    opening = Opening(
        run=run,
        at=planned.at,
        sequence_length=stage.sequence_length,
        seed=stage.data.seed,
        order_key=planned.key,
        first_stage=stage.number == 0,
        reserved=reserved,
        opened=opened,
    )
    with complete_keys(planned.at):
        return planned.spec.open(opening)


def open_stage(sources: Sources, stage: StagePlan) -> OpenStage:
    """Return a stage with all of its sources open."""
    opened = [sources.source(stage, number) for number in range(len(stage.sources))]
    sources.check_held_out(stage)
    keys = [planned.key for planned in stage.sources]
    lengths = [None if source.is_stream else len(source) for source in opened]
    return OpenStage(stage, opened, Order(lengths, keys, sources.mixing(stage)))
