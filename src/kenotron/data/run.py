"""The data of one run: its stages, batches and validation.

    with open_run(config) as data:
        for step, batches in enumerate(data.loader(start_step=1), start=1):     # resume: start_step=1001
            for batch in batches: ...                                           # this rank's micro-batches

A step has the next samples of its stage, as many as its global batch, computed by arithmetic (`StagePlan`).
`batch.batch_places` selects those that a rank reads: the set of samples of a step never depends on the layout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

import numpy as np

from kenotron.config import Config
from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError, counted, is_a_path, nearest_sibling, no_such_path
from kenotron.data.batch import Int64, TokenBatch, batch_places
from kenotron.data.held_out_batches import HeldOut
from kenotron.data.loader import Prefetcher
from kenotron.data.open_stage import OpenStage, Sources, open_planned, open_stage
from kenotron.data.source import RunSettings, StreamSource, TextSpec, TokenSource
from kenotron.data.stage_plan import (
    SPLITS,
    SourcePlan,
    Split,
    StagePlan,
    all_sources,
    differences,
    plan_evaluated,
    plan_stages,
)
from kenotron.data.stream_states import RunStreams
from kenotron.text.tokenizer import TextTokenizer, end_of_text, load_tokenizer

SOME_EPOCHS = 1e-4  # fewer epochs are not shown, such as those of endless random tokens
AHEAD = 16
"""The number of steps ahead for which blocks of remote files are fetched."""


class RunData:
    """See the module. Created by `open_run`; `close` it, or use it in a `with`.

    Several threads may request batches. A stage is opened in the background while the previous one runs.
    """

    def __init__(self, settings: RunSettings, stages: list[StagePlan]) -> None:
        self.config, self.tokenizer, self.stages = settings.config, settings.tokenizer, stages
        self._report = settings.report
        self._pool = ThreadPoolExecutor(1, "kenotron-stage")
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._opened: dict[int, Future[OpenStage]] = {}
        self.settings = replace(settings, stop=self._stop)
        self.whole_settings = replace(self.settings, val_fraction=1.0)
        self.evaluated: dict[Split, list[tuple[SourcePlan, TokenSource]]] = {}
        self.sources = Sources(self.settings, stages)
        self.streams = RunStreams(stages, self.sources)
        self._asked = 0  # the step up to which blocks of remote files were requested
        self._flying: WeakSet[Future[bytes]] = WeakSet()  # weak: a block is in memory until it is on the disk

    @property
    def vocab_size(self) -> int:
        """The size of the tokenizer's vocabulary, or of the model's if there is no tokenizer."""
        return self.tokenizer.vocab_size if self.tokenizer else self.settings.vocab_size

    # ---- training ----

    def loader(
        self, start_step: int = 1, stop_step: int | None = None, dp_rank: int = 0, dp_size: int = 1
    ) -> Prefetcher[list[TokenBatch]]:
        """Return the micro-batches of the steps [start_step, stop_step), made ahead by threads.

        `stop_step` is ``train_steps + 1`` by default. The number of threads is the largest `num_loading_workers` of the
        stages, or at most one if a stage has a stream.
        """
        stop = self.config.tokens.train_steps + 1 if stop_step is None else stop_step
        workers = max(stage.data.num_loading_workers for stage in self.stages) if start_step < stop else 0
        if self.streams and start_step < stop:
            if workers > 1 and dp_rank == 0:
                self._report(f"num_loading_workers: a stream is read in order, so 1 thread reads ahead, not {workers}")
            workers = min(workers, 1)

        def make(step: int) -> list[TokenBatch]:
            if workers:
                self._fetch_ahead(step, stop, dp_rank, dp_size)
            return self.batch(step, dp_rank, dp_size)

        return Prefetcher(make, start_step, stop, workers)

    def _fetch_ahead(self, step: int, stop: int, dp_rank: int, dp_size: int) -> None:
        """Start downloading the remote blocks of the `AHEAD` steps from `step` on, once for each step."""
        opened = self.stage_of(step)
        with self._lock:
            first = self._asked if step <= self._asked < step + 2 * AHEAD else step  # threads take turns
            last = min(step + AHEAD, stop, opened.stop)
            self._asked = max(first, last)
        for ahead in range(first, last):
            total = opened.stage.batch_size(ahead)
            in_batch = batch_places(total, self.config.tokens.micro_batch_size, dp_rank, dp_size)
            futures = opened.fetch_ahead(opened.stage.samples_before(ahead) + in_batch)
            with self._lock:
                self._flying.update(futures)

    def batch(self, step: int, dp_rank: int = 0, dp_size: int = 1) -> list[TokenBatch]:
        """Return the micro-batches of one rank at `step` (from 1)."""
        opened = self.stage_of(step)
        micro, total = self.config.tokens.micro_batch_size, opened.stage.batch_size(step)
        if total % (micro * dp_size):
            raise InputError(
                f"the global batch of {total} samples does not divide into micro-batches of {micro} "
                f"on {dp_size} data-parallel ranks"
            )
        in_batch = batch_places(total, micro, dp_rank, dp_size)
        if (why := self.exhausted(step)) is not None:
            raise InputError(f"step {step} is not in the run: {why}")
        positions = opened.stage.samples_before(step) + in_batch
        masking = self.config.model.document_masking or opened.masks_documents
        batch = opened.read(positions, self.samples_before(step) + in_batch, masking)
        for number, source in enumerate(opened.sources):
            if isinstance(source, StreamSource):
                drawn = opened.order.mixing.drawn(opened.stage.samples_before(step + 1))[number]
                source.advance(step, drawn)
        return [batch[first : first + micro] for first in range(0, len(positions), micro)]

    def stage_of(self, step: int) -> OpenStage:
        """Return the open stage of `step`, and begin to open the next one, whose errors are raised at once."""
        number = self.stage_at(step).number
        opened = self._open(number)
        if number + 1 < len(self.stages) and self.stages[number + 1].steps:
            upcoming = self._open(number + 1)
            if upcoming.done() and (error := upcoming.exception()):
                raise error
        return opened.result()

    def stage_at(self, step: int) -> StagePlan:
        """Return the stage of `step`."""
        for stage in self.stages:
            if stage.start <= step < stage.stop:
                return stage
        first, last = max(1, self.stages[0].start), self.config.tokens.train_steps
        raise InputError(f"step {step} is not in the run: its steps are {first} to {last}")

    def samples_before(self, step: int) -> int:
        """Return the number of samples in the run's steps before `step`."""
        return sum(stage.samples_before(step) for stage in self.stages)

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens in the run's steps before `step`."""
        return sum(stage.tokens_before(step) for stage in self.stages)

    def last_step(self, step: int) -> int:
        """Return the last step with samples, as far as the stages up to the one of `step` determine it."""
        for stage in self.stages[: self.stage_at(step).number + 1]:
            end = self.sources.mixing(stage).end
            if end is not None and end < stage.samples:
                return stage.step_of(end) - 1
        return self.config.tokens.train_steps

    def exhausted(self, step: int) -> str | None:
        """Return the reason why there are no samples for `step`, exhausted sources, or None if there are samples."""
        for stage in self.stages[: self.stage_at(step).number + 1]:
            mixing = self.sources.mixing(stage)
            if mixing.end is not None and mixing.end < stage.samples_before(step + 1):
                source = stage.sources[mixing.reached[-1][0]]
                return f"'{source.label}' is exhausted after {_epochs(source)}"
        return None

    def consumption(self, step: int) -> dict[str, tuple[int, float | None]]:
        """Return label → (tokens read, epochs) of each source after `step`; epochs None if not in that step's stage.

        All of it is arithmetic.
        """
        found: dict[str, tuple[int, float | None]] = {}
        for stage in self.stages[: self.stage_at(step).number + 1]:
            mixing = self.sources.mixing(stage)
            drawn = mixing.drawn(stage.samples_before(step + 1))
            for number, source in enumerate(stage.sources):
                before, _ = found.get(source.label, (0, None))
                epochs = None
                if stage.start <= step < stage.stop and not source.spec.is_stream:
                    epochs = drawn[number] / len(self.sources.source(stage, number))
                found[source.label] = before + (drawn[number] - mixing.offsets[number]) * stage.sequence_length, epochs
        return found

    def passes(self, step: int, interval: int) -> list[int]:
        """Return how many times `interval` epochs of its stage's first source were read before and after this step."""
        stage = self.stage_at(step)
        mixing, size = self.sources.mixing(stage), len(self.sources.source(stage, 0))
        return [mixing.drawn(stage.samples_before(each))[0] // (interval * size) for each in (step, step + 1)]

    def describe_epochs(self, step: int) -> str:
        """Return ``; after step 1000: 0.52 epochs of code`` for the finite sources of that step's stage."""
        read = {name: epochs or 0.0 for name, (_, epochs) in self.consumption(step).items()}
        epochs = ", ".join(f"{each:.3g} epochs of {name}" for name, each in read.items() if each > SOME_EPOCHS)
        return f"; after step {step}: {epochs}" if epochs else ""

    # ---- validation and test ----

    def validation(
        self, dp_rank: int = 0, dp_size: int = 1, split: Split = "val"
    ) -> Iterator[tuple[TokenBatch, float, int]]:
        """Yield this rank's held-out batches, each with the UTF-8 bytes of its labels (0.0: unknown) and the index of
        its source in `held_out`.

        They are the same at every step of the run, so that its results are comparable.
        """
        tokens, limit = self.config.tokens, self.settings.validation_samples
        if split == "test":
            limit = tokens.limit_test_batches * self.config.global_batch_size if tokens.limit_test_batches > 0 else None
        return self.held_out(split).batches(limit, tokens.micro_batch_size, dp_rank, dp_size)

    def held_out(self, split: Split = "val") -> HeldOut:
        """Return the samples of `tokens.test_datasets` or `val_datasets`, or else those that the first stage holds out.

        Raises InputError if there are none.
        """
        plans, opened = zip(*self._sources_of(split))
        sources = [source for source in opened if len(source.held_out)]
        if not sources:
            raise InputError(
                "no document is left for validation (tokens.val_check_interval): give two documents or more, raise "
                f"tokens.val_fraction (now {self.config.tokens.val_fraction}), or set tokens.val_check_interval=-1"
            )
        means = [source.held_out.bytes_per_token for source in sources]
        all_text = None not in means  # bytes of only some tokens would be misleading
        return HeldOut(
            sources=[source.held_out for source in sources],
            labels=[plan.label for plan, source in zip(plans, opened) if len(source.held_out)],
            sequence_length=self.settings.first_sequence_length,
            token_bytes=self._token_bytes() if all_text else None,
            bytes_per_token=[mean or 0.0 for mean in means] if all_text else [0.0] * len(sources),
            document_masking=self.config.model.document_masking or any(each.masks_documents for each in opened),
            eos=self.settings.eos,
        )

    def _sources_of(self, split: Split) -> list[tuple[SourcePlan, TokenSource]]:
        """Return the sources whose `held_out` is used for `split`: the datasets of `tokens`, opened with everything
        held out, or if there are none, the first stage's. Once open, they are in `evaluated`.
        """
        if split not in self.evaluated:
            own = self._open_whole(plan_evaluated(self.config, split))
            self.evaluated[split] = own or list(zip(self.stages[0].sources, self._open(0).result().sources))
        return self.evaluated[split]

    def _open_whole(self, plans: Iterable[SourcePlan]) -> list[tuple[SourcePlan, TokenSource]]:
        found = []
        for plan in plans:
            source = open_planned(plan, self.stages[0], self.whole_settings)
            if not len(source.held_out):
                raise InputError(f"{plan.at}: {source.name} has less than a sequence: {source.found()}")
            found.append((plan, source))
        return found

    def _token_bytes(self) -> Int64 | None:
        table = self.tokenizer.token_bytes() if self.tokenizer else None
        return None if table is None else np.pad(table, (0, max(0, self.settings.vocab_size - len(table))))

    # ---- stages ----

    def describe(self) -> list[str]:
        """Return lines for the console about the data that are read."""
        lines = [f"tokenizer: {describe_tokenizer(self.tokenizer, self.settings.eos)}"]
        rows, used = self.settings.vocab_size, self.vocab_size
        if used > rows or 2 * used < rows:
            advice = "text with the others fails; set that" if used > rows else "the other rows are never trained"
            lines.append(f"warning: model.model_config.vocab_size is {rows:,}, the tokenizer has {used:,}: {advice}")
        for stage in (stage for stage in self.stages if stage.stop > 1):  # others ended before the run began
            if stage.stop <= stage.start:
                steps = self.config.tokens.train_steps
                lines.append(
                    f"[{stage.name}] from step {stage.start} on: not reached, the run has {counted(steps, 'step')}"
                )
                continue
            opened = self._open_by_now().get(stage.number)
            head = f"[{stage.name}] steps {max(stage.start, 1)}-{stage.stop - 1}, {stage.describe_shape()}"
            if opened is None:
                lines.append(f"{head}: opened when its turn comes")
                continue
            mixing, total = opened.order.mixing, sum(opened.order.mixing.weights)
            for weight, source in zip(mixing.weights, opened.sources):
                lines.append(f"{head}: {weight / total:.2%} {source.describe()}")
            lines += [f"[{stage.name}] {line}" for line in self._limits(opened)]
        for split, some in self.evaluated.items():
            own = [each for plan, each in some if plan.at.startswith("tokens.")]
            lines += [f"[{SPLITS[split]}] {each.name}: {len(each.held_out):,} samples" for each in own]
        return [*lines, *self._begun_anew()]

    def _limits(self, opened: OpenStage) -> Iterator[str]:
        """Yield what happens in a stage when its sources reach their limits of epochs."""
        stage, mixing = opened.stage, opened.order.mixing
        for source, position in mixing.reached:
            step = stage.step_of(position)
            if step < stage.stop:
                planned = stage.sources[source]
                ends = mixing.end is not None and source == mixing.reached[-1][0]
                repeats = stage.data.when_exhausted == "repeat"
                goes_on = "it is repeated" if repeats else "the others continue without it"
                then = f"the run ends after step {opened.stop - 1}" if ends else goes_on
                yield f"{planned.label} reaches its {_epochs(planned)} at step {step}: {then}"

    def _begun_anew(self) -> Iterator[str]:
        """Yield the sources that are read from the beginning again because they are read with other options."""
        for stage in self.stages[1:]:
            before = [source for earlier in self.stages[: stage.number] for source in earlier.sources]
            for source in stage.sources if not stage.data.restart else ():
                if source.name in [other.name for other in before]:
                    continue
                if why := min(filter(None, (differences(source, other) for other in before)), key=len, default=None):
                    yield (
                        f"[{stage.name}] {source.label} is read again with {' and '.join(why)}: its samples or "
                        "their order differ, so it is read from its beginning"
                    )

    def fingerprints(self) -> dict[str, str]:
        """Return name → a key that changes with the content, for every source of text or tokenized files that is open
        by now, and for the tokenizer, under "tokenizer".
        """
        found: dict[str, str] = {}
        if self.tokenizer is not None:
            found["tokenizer"] = self.tokenizer.hash
        for opened in self._open_by_now().values():
            for source in opened.sources:
                if (fingerprint := source.fingerprint) is None:
                    continue
                name, number = source.name, 2
                while found.get(name, fingerprint) != fingerprint:  # other text with the same name
                    name, number = f"{source.name} ({number})", number + 1
                found[name] = fingerprint
        return found

    def held_out_hashes(self) -> list[str]:
        """Return `Sources.chosen` in hexadecimal."""
        return [f"{each:016x}" for each in sorted(self.sources.chosen)]

    def close(self) -> None:
        """Stop all background work."""
        self._stop.set()
        with self._lock:
            for future in self._flying:
                future.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> RunData:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_by_now(self) -> dict[int, OpenStage]:
        """Return the stages that are open by now, by number, in order."""
        with self._lock:
            futures = sorted(self._opened.items())
        return {number: each.result() for number, each in futures if each.done() and not each.exception()}

    def _open(self, number: int) -> Future[OpenStage]:
        with self._lock:
            if number not in self._opened:
                self._opened[number] = self._pool.submit(open_stage, self.sources, self.stages[number])
            return self._opened[number]


def _epochs(source: SourcePlan) -> str:
    """Return the limit of a source, such as ``1 epoch`` or ``2.5 epochs``."""
    return f"{source.max_epochs:g} epoch{'s' * (source.max_epochs != 1)}"


def open_run(
    config: Config,
    start_step: int = 1,
    report: Callable[[str], None] = print,
    tokenizer_folder: Path | None = None,
    held_out: Iterable[str] = (),
) -> RunData:
    """Open the data of a run at `start_step`: tokenizer, then the stage of that step; the next one in the background.

    `report` is called with one line at a time. A run that continues passes the `tokenizer_folder` of its checkpoint,
    whose tokenizer is then used instead of being trained or loaded by name again (a missing folder changes nothing). It
    also passes its checkpoint's `held_out_hashes`, so that files added since do not bring these documents into
    training.

    Raises InputError, in one line, for invalid data, or if a run that validates has nothing held out.
    """
    stages, settings = plan_stages(config), run_settings(config, report)
    tokenizer = tokenizer_of(settings, stages, tokenizer_folder)
    eos = end_of_text(tokenizer, config.model.architecture)
    hashes = frozenset(int(each, 16) for each in held_out)
    data = RunData(replace(settings, tokenizer=tokenizer, eos=eos, held_out=hashes), stages)
    step = min(start_step, config.tokens.train_steps)
    stage = data.stage_at(step)
    try:
        first: Future[OpenStage] = Future()
        first.set_result(open_stage(data.sources, stage))  # this thread may show a bar and be interrupted
        data._opened[stage.number] = first
        # All uses of earlier stages come before the next one is opened, slowly, in the background.
        why = data.exhausted(step)
        if start_step == 1 and why is not None:
            raise InputError(f"no sample for a single step: {why}")
        if config.tokens.validates:
            data.held_out()  # fails now, not at the first validation
            for stream in (each.sources[0] for each in stages if each.sources[0].spec.is_stream):
                if config.tokens.val_check_unit == "epochs":
                    raise InputError(f"tokens.val_check_unit: expected steps or tokens: {stream.label} has no epochs")
        if config.tokens.limit_test_batches:
            data.held_out("test")
        data.stage_of(step)
    except BaseException:
        data.close()
        raise
    return data


def run_settings(config: Config, report: Callable[[str], None]) -> RunSettings:
    """Return what opening a source needs from `config`; the tokenizer is not loaded yet."""
    tokens, architecture = config.tokens, config.model.architecture
    assert hasattr(architecture, "vocab_size"), "refused before: an architecture of another library"
    limits = [tokens.limit_val_batches * config.global_batch_size, tokens.val_samples]
    return RunSettings(
        config=config,
        vocab_size=architecture.vocab_size,
        eos=end_of_text(None, architecture),
        val_fraction=tokens.val_fraction,
        validates=tokens.validates and tokens.val_datasets is None,
        validation_samples=min((limit for limit in limits if limit is not None and limit > 0), default=None),
        first_sequence_length=next(iter(config.sequence_lengths.values())),
        tokenizer=None,
        report=report,
    )


def tokenizer_of(run: RunSettings, stages: Sequence[StagePlan], folder: Path | None) -> TextTokenizer | None:
    """Return the run's tokenizer; None if the config names none and all data are tokens already.

    A run that continues passes the `folder` that its tokenizer was saved in: it is loaded from there, even if the data
    or its first source have changed since. A missing folder means that the run had none, and changes nothing.

    Raises InputError if it is not found or the hub is unreachable. If all data are tokens, a hub name that cannot be
    loaded is only a warning, because nanotron's configs always name one.
    """
    section = run.config.tokenizer
    has_text = any(isinstance(source.spec, TextSpec) for source in all_sources(run.config, stages))
    if section.tokenizer_max_length is not None and not has_text:
        run.report("warning: tokenizer.tokenizer_max_length cuts nothing: no stage reads text")
    if folder is not None and folder.is_dir():
        return load_tokenizer(folder)
    if section.train is not None:
        train = "kenotron.data.train_tokenizer.trained_tokenizer"
        return import_dotted(train, "tokenizer.train")(stages[0].sources, section.train.vocab_size, run)
    if section.tokenizer_name_or_path is None:
        return None
    name = section.tokenizer_name_or_path
    try:
        return load_tokenizer(name, section.tokenizer_revision)
    except InputError as error:
        if has_text or is_a_path(name):
            raise
        if nearest_sibling(Path(name)):  # probably a mistyped folder
            raise no_such_path("tokenizer.tokenizer_name_or_path", name) from None
        run.report(f"warning: no tokenizer in this run, which its data do not need: {error}")
        return None


def describe_tokenizer(tokenizer: TextTokenizer | None, eos: int) -> str:
    """Return one line for the console: the tokenizer, its size, and the token that ends a document."""
    if tokenizer is None:
        return "none (the data are tokens already)"
    origin = "model_config.eos_token_id, as the tokenizer has none" if tokenizer.eos_token_id is None else "its own"
    level = "byte-level, " if tokenizer.is_byte_level else ""
    return f"{tokenizer.name} ({level}{tokenizer.vocab_size:,} entries); documents end with token {eos} ({origin})"
