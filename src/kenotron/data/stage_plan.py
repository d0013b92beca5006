"""The stages of a run and their sources, derived from the config only: nothing is opened here.

    data_stages:                                     stage 0: steps 1-9      {a: 3, b: 1}
      - {start_training_step: 1,  mixture a 3, b 1}  stage 1: steps 10-15    {a: 1}
      - {start_training_step: 10, only a}            16 samples per step: stage 1 continues `a` at its sample 108

A source that a later stage reads again (same data, seed and sequence length) continues where it stopped, so that
nothing is read twice before everything was read once; `restart` of a stage starts over. A source's position is computed
(`order.Mixing`); if that requires a source's length, because of a weight or a limit, the source is opened.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kenotron.config import Config
from kenotron.config.data_stages import Data, MixtureDataset, PlainDataset
from kenotron.config.errors import InputError, no_such_path, shortest_end
from kenotron.config.remote_data import is_remote
from kenotron.data.ramps import Level, level_of_sample, level_of_step, levels
from kenotron.data.source import SourceSpec
from kenotron.data.sources import specs_of
from kenotron.kernels.hashing import derive_key

Measure = Callable[[int, str], float]
"""(i, unit) → the amount of source i of a stage, in "tokens" or as its "size" in bytes."""
Split = Literal["val", "test"]
SPLITS: dict[Split, str] = {"val": "validation", "test": "test"}


@dataclass(frozen=True)
class SourcePlan:
    """One source of a stage.

    `name` is equal in the stages that continue it; `label` is short and unique in the run, for users. `at` is the
    complete key of its dataset, which is number `group` of the mixture; `share` is its share of that dataset, a number
    or a measure. `key` seeds its shuffling.
    """

    at: str
    spec: SourceSpec
    group: int
    share: float | str
    max_epochs: float | None
    name: str = ""
    label: str = ""
    key: int = 0


@dataclass(frozen=True)
class StagePlan:
    """Steps [start, stop) of the run, counted from 1.

    A sample is `sequence_length` tokens; `levels` are its ramp (ramps.py), `data` its section of the config.
    """

    number: int
    name: str
    start: int
    stop: int
    sequence_length: int
    levels: tuple[Level, ...]
    data: Data
    sources: tuple[SourcePlan, ...]

    @property
    def steps(self) -> int:
        """The number of steps of the stage."""
        return self.stop - self.start

    @property
    def samples(self) -> int:
        """The number of samples of the stage."""
        return self.samples_before(self.stop)

    def describe_shape(self) -> str:
        """Return ``sequence length 64``, and the ramp if there is one."""
        text = f"sequence length {self.sequence_length}"
        if len(self.levels) > 1:
            first, last = self.levels[0], self.levels[-1]
            text += f", {last.size} samples a step ({first.size} at first, all from step {self.start + last.first} on)"
        return text

    def batch_size(self, step: int) -> int:
        """Return the number of samples of `step`, which must be in the stage."""
        return level_of_step(self.levels, step - self.start).size

    def samples_before(self, step: int) -> int:
        """Return the number of this stage's samples before `step`: 0 up to its start, all of them from its stop on."""
        done = min(max(step, self.start), self.stop) - self.start
        level = level_of_step(self.levels, done)
        return level.before + (done - level.first) * level.size

    def tokens_before(self, step: int) -> int:
        """Return the number of this stage's tokens before `step`."""
        return self.samples_before(step) * self.sequence_length

    def step_of(self, sample: int) -> int:
        """Return the step that reads this sample (from 0) of the stage."""
        level = level_of_sample(self.levels, sample)
        return self.start + level.first + (sample - level.before) // level.size

    def shares(self, measure: Measure) -> list[float]:
        """Return each source's weight, positive and not normalised; `measure` is called only if no weight is set.

        Nested weights multiply.
        """
        found: list[float] = []
        for group, section in enumerate(self.data.datasets):
            weight = section.weight if section else None
            shares = {i: source.share for i, source in enumerate(self.sources) if source.group == group}
            parts = [measure(i, share) if isinstance(share, str) else share for i, share in shares.items()]
            if weight is not None:
                whole = sum(measure(i, weight) for i in shares) if isinstance(weight, str) else weight
                total = sum(parts)
                parts = [whole * part / total for part in parts]
            found += parts
        temperature = self.data.temperature
        if temperature == 1:
            return found
        return [max((weight / max(found)) ** (1 / temperature), 1e-300) for weight in found]


def stages_without_sources(config: Config) -> Iterator[StagePlan]:
    """Yield the stages of `config`, which has them in order of their start, without a look at their data."""
    tokens, stages = config.tokens, config.data_stages
    ends = [stage.start_training_step for stage in stages[1:]] + [tokens.train_steps + 1]
    for number, (stage, end) in enumerate(zip(stages, ends)):
        start, length = stage.start_training_step, stage.sequence_length or tokens.sequence_length
        stop = max(start, min(end, tokens.train_steps + 1))
        rising = levels(stage.batch_size_ramp, config.global_batch_size)
        yield StagePlan(number, stage.name, start, stop, length, rising, stage.data, ())


def plan_stages(config: Config) -> list[StagePlan]:
    """Return the stages of `config` with their sources.

    Raises InputError for a restart of a source that no earlier stage reads, or an unreadable mix file.
    """
    stages = list(stages_without_sources(config))
    described = [_sources_of(datasets_of(stage.data, stage.number)) for stage in stages]
    labels = iter(short_labels([[source.spec for source in those] for those in described]))
    numbers: dict[str, int] = {}
    planned: list[StagePlan] = []
    for stage, those in zip(stages, described):
        names = identities([source.spec for source in those], stage.data.seed, stage.sequence_length)
        # Shuffling depends on the position of a source in the config, not on its path: data may move.
        keys = [derive_key("order", stage.data.seed, numbers.setdefault(name, len(numbers))) for name in names]
        sources = tuple(
            replace(source, name=name, label=next(labels), key=key) for name, key, source in zip(names, keys, those)
        )
        earlier = {source.label for before in planned for source in before.sources}
        if stage.data.restart and earlier.isdisjoint(source.label for source in sources):
            raise InputError(
                f"data_stages.{stage.number}.data.restart: expected false: no earlier stage reads any of its sources"
            )
        planned.append(replace(stage, sources=sources))
    return planned


def plan_evaluated(config: Config, split: Split) -> list[SourcePlan]:
    """Return the sources of `tokens.val_datasets` or `tokens.test_datasets`.

    Raises InputError for an unreadable mix file.
    """
    sources = _sources_of([each for each in config.tokens.evaluated if each[0].startswith(f"tokens.{split}_")])
    labels = short_labels([[source.spec for source in sources]])
    return [replace(source, label=label) for label, source in zip(labels, sources)]


def all_sources(config: Config, stages: Iterable[StagePlan]) -> list[SourcePlan]:
    """Return the sources of `stages`, and those of validation and test."""
    of_stages = [source for stage in stages for source in stage.sources]
    return of_stages + plan_evaluated(config, "val") + plan_evaluated(config, "test")


def check_paths(config: Config, first: int = 1, last: int | None = None) -> None:
    """Check that the local paths that steps `first` to `last` (None: the end) read exist, without opening them.

    Raises InputError if one does not exist, and as `plan_stages` does.
    """
    stages = [stage for stage in plan_stages(config) if first < stage.stop and (last is None or stage.start <= last)]
    for source in all_sources(config, stages):
        key, paths = source.spec.paths()
        with complete_keys(source.at):
            for path in paths:
                if not is_remote(path) and not Path(path).expanduser().exists():
                    raise no_such_path(key, path)


def check_files(config: Config, first: int = 1) -> None:
    """List and open the local files that steps from `first` on read, without reading their text or tokens.

    Raises InputError for an empty folder or a damaged file, and as `plan_stages` does.
    """
    for source in all_sources(config, [stage for stage in plan_stages(config) if first < stage.stop]):
        if not any(is_remote(path) for path in source.spec.paths()[1]):
            with complete_keys(source.at):
                source.spec.check_files()


def identities(specs: Sequence[SourceSpec], seed: int, sequence_length: int) -> list[str]:
    """Return a name for each source, equal across stages for equal data, seed and length, and unique in a stage."""
    order = {"seed": seed, "sequence_length": sequence_length}
    texts = [json.dumps(spec.identity() | order, sort_keys=True, default=str) for spec in specs]
    return [f"{text} {texts[:number].count(text)}" for number, text in enumerate(texts)]


READ_OPTIONS = (
    "dtype",
    "max_tokens",
    "shuffle_files",
    "packing",
    "streaming",
    "debug_max_samples",
    "seed",
    "sequence_length",
)
"""The keys of identities that say how data are read; the others say which data they are."""


def differences(new: SourcePlan, old: SourcePlan) -> list[str]:
    """Return why `new` does not continue `old`, such as ``seed 7, not 42``; empty if it does, or has other data."""
    now, then = (json.loads(source.name[: source.name.rindex(" ")]) for source in (new, old))
    changed = [key for key in now | then if now.get(key) != then.get(key)]
    if not new.spec.identity() or set(changed) - set(READ_OPTIONS):
        return []
    return [f"{key.replace('_', ' ')} {now[key]}, not {then[key]}" for key in READ_OPTIONS if key in changed]


def datasets_of(data: Data, stage: int) -> list[tuple[str, PlainDataset | None]]:
    """Return the datasets of a stage, of its mixture or its single one, each with its complete key in the config."""
    at = f"data_stages.{stage}.data.dataset"
    if isinstance(data.dataset, MixtureDataset):
        return [(f"{at}.mixture.{number}", each) for number, each in enumerate(data.dataset.mixture)]
    return [(at, data.dataset)]


def all_datasets_of(config: Config) -> list[tuple[str, PlainDataset | None]]:
    """Return the datasets of all stages, and of validation and test, each with its complete key."""
    stages = [each for number, stage in enumerate(config.data_stages) for each in datasets_of(stage.data, number)]
    return stages + config.tokens.evaluated


@contextmanager
def complete_keys(at: str) -> Iterator[None]:
    """Replace ``dataset`` in errors that begin with ``dataset.some_key`` by the dataset's complete key `at`."""
    try:
        yield
    except InputError as error:
        if not str(error).startswith("dataset."):
            raise
        raise InputError(at + str(error).removeprefix("dataset")) from error


def _sources_of(datasets: Iterable[tuple[str, PlainDataset | None]]) -> list[SourcePlan]:
    """Return the sources of (complete key, dataset) pairs, still without names, labels and keys."""
    sources = []
    for group, (at, section) in enumerate(datasets):
        limit = section.max_epochs if section else None
        with complete_keys(at):
            sources += [SourcePlan(at, spec, group, share, limit) for share, spec in specs_of(section)]
    return sources


def short_labels(stages: Sequence[Sequence[SourceSpec]]) -> list[str]:
    """Return a label for each source of each stage: the shortest end of its path that is unique.

    The same data have one label in all stages, for any seed and sequence length.
    """
    names = [name for specs in stages for name in identities(specs, 0, 0)]
    full = dict(zip(names, (spec.title for specs in stages for spec in specs)))
    labels: dict[str, str] = {}
    for name, title in full.items():
        label = shortest_end(title, [other for other in full.values() if other != title])
        numbered = (f"{label}-{number}" for number in range(2, len(full) + 1))
        labels[name] = next(new for new in (label, *numbered) if new not in labels.values())
    return [labels[name] for name in names]
