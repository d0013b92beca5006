"""The stages of a run and their sources, as the config alone tells them: nothing is opened here.

    data_stages:                                     stage 0: steps 1-9      {a: 3, b: 1}
      - {start_training_step: 1,  mixture a 3, b 1}  stage 1: steps 10-15    {a: 1}
      - {start_training_step: 10, only a}            16 samples a step: stage 1 takes up `a` at its sample 108

A source that comes again in a later stage (same data, seed and sequence length) goes on where it stopped, so that
nothing is read twice before all was read once; `restart` of a stage begins anew. How far a source got is arithmetic
(`order.Mixing`); where that takes the length of a source, because of a weight or a limit, stages.py opens it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kenotron.config.data import paths_of
from kenotron.config.errors import InputError, NotSupportedYet, no_such_path
from kenotron.config.remote import RemoteData
from kenotron.kernels.hashing import derive_key

from .examples import Columns, ExampleTexts
from .ramps import Level, length_of_step, lengths, level_of_sample, level_of_step, levels
from .remote import as_path, is_remote
from .texts import FileTexts, RowHook, Texts, find_files, has_rows, python_stdlib
from .token_paths import TokenPath, token_paths
from .tokenizer import Tokenizer

Measure = Callable[[int, str], float]
"""How much source i of a stage holds, in "tokens" or as its "size" in bytes."""


@dataclass(frozen=True)
class SourcePlan:
    """One source of a stage.

    `name` is equal wherever later stages go on with it; `label` is what people call it, short and unique in the run.
    `at` is the whole key of its dataset, `dataset` what stands there or one path of it, the number `group` of a
    mixture's; `share` is its part of that, a number or a measure.
    `key` seeds its shuffling.
    """

    name: str
    label: str
    at: str
    dataset: Any
    key: int
    group: int
    share: float | str
    max_epochs: float | None


@dataclass(frozen=True)
class Stage:
    """Steps [start, stop) of the run, counted from 1.

    A sample is `sequence_length` tokens; `levels` and `lengths` are its ramps (ramps.py).
    """

    number: int
    name: str
    start: int
    stop: int
    sequence_length: int
    levels: tuple[Level, ...]
    lengths: tuple[tuple[int, int], ...]
    seed: int
    workers: int
    sources: tuple[SourcePlan, ...]
    weights: tuple[float | str | None, ...] = ()
    """Of the datasets of its mixture; (None,) without one."""
    temperature: float = 1.0
    when_exhausted: Any = "stop"
    restart: bool = False

    @property
    def steps(self) -> int:
        return self.stop - self.start

    @property
    def samples(self) -> int:
        """Samples of the whole stage."""
        return self.samples_before(self.stop)

    def describe_shape(self) -> str:
        """``sequence length 64``, and how it and the batch size get to what they are."""
        text = f"sequence length {self.sequence_length}"
        if len(self.lengths) > 1:
            text += f" ({self.lengths[0][1]} at first, whole from step {self.start + self.lengths[-1][0]} on)"
        if len(self.levels) > 1:
            first, last = self.levels[0], self.levels[-1]
            text += f", {last.size} samples a step ({first.size} at first, all from step {self.start + last.first} on)"
        return text

    def batch_size(self, step: int) -> int:
        """Samples of `step`, which is one of the stage's."""
        return level_of_step(self.levels, step - self.start).size

    def length_at(self, step: int) -> int:
        """Tokens of the sequences that `step`, which is one of the stage's, trains on."""
        return length_of_step(self.lengths, step - self.start)

    def samples_before(self, step: int) -> int:
        """Samples of this stage that the run takes before `step`: 0 up to its start, all of them from its stop on."""
        done = min(max(step, self.start), self.stop) - self.start
        level = level_of_step(self.levels, done)
        return level.before + (done - level.first) * level.size

    def tokens_before(self, step: int) -> int:
        """Tokens of this stage that the run takes before `step`."""
        return self.samples_before(step) * self.sequence_length

    def step_of(self, sample: int) -> int:
        """The step that takes this sample of the stage, from 0."""
        level = level_of_sample(self.levels, sample)
        return self.start + level.first + (sample - level.before) // level.size

    def shares(self, measure: Measure) -> list[float]:
        """The weight of each source, positive and not normalised; `measure` is asked only where none is given.

        Nested weights multiply.
        """
        found: list[float] = []
        for group, weight in enumerate(self.weights):
            numbers = [i for i, source in enumerate(self.sources) if source.group == group]
            parts = [self._part(i, measure) for i in numbers]
            if weight is not None:
                whole = sum(measure(i, weight) for i in numbers) if isinstance(weight, str) else weight
                total = sum(parts)
                parts = [whole * part / total for part in parts]
            found += parts
        if self.temperature == 1:
            return found
        return [max((weight / max(found)) ** (1 / self.temperature), 1e-300) for weight in found]

    def _part(self, number: int, measure: Measure) -> float:
        share = self.sources[number].share
        return measure(number, share) if isinstance(share, str) else share


def plan_stages(config: Any) -> list[Stage]:
    """The stages of `config` in order of their start."""
    tokens, stages = config.tokens, sorted(config.data_stages, key=lambda stage: stage.start_training_step)
    starts = [stage.start_training_step for stage in stages] + [tokens.train_steps + 1]
    groups = [datasets_of(stage.data.dataset, number) for number, stage in enumerate(stages)]
    parts = [
        [(g, at, dataset, *part) for g, (at, dataset) in enumerate(group) for part in split(dataset, at)]
        for group in groups
    ]
    labels = iter(short_labels([[source for *_, source in those] for those in parts]))
    numbers: dict[str, int] = {}
    planned: list[Stage] = []
    for number, stage in enumerate(stages):
        start, stop = starts[number], max(starts[number], min(starts[number + 1], tokens.train_steps + 1))
        length, data = stage.sequence_length or tokens.sequence_length, stage.data
        names = identities([source for *_, source in parts[number]], data.seed, length)
        # Shuffling depends on the place of a source in the config, not on its path: data may move.
        keys = [derive_key("order", data.seed, numbers.setdefault(name, len(numbers))) for name in names]
        sources = tuple(
            SourcePlan(name, next(labels), at, source, key, group, share, getattr(dataset, "max_epochs", None))
            for name, key, (group, at, dataset, share, source) in zip(names, keys, parts[number])
        )
        earlier = {source.label for stage in planned for source in stage.sources}
        if data.restart and earlier.isdisjoint(source.label for source in sources):
            raise InputError(
                f"data_stages.{number}.data.restart: expected false: no earlier stage reads of its sources"
            )
        planned.append(
            Stage(
                number=number,
                name=stage.name,
                start=start,
                stop=stop,
                sequence_length=length,
                levels=levels(stage.batch_size_ramp, config.global_batch_size),
                lengths=lengths(stage.sequence_length_ramp, length),
                seed=data.seed,
                workers=data.num_loading_workers,
                sources=sources,
                weights=tuple(getattr(dataset, "weight", None) for _, dataset in groups[number]),
                temperature=data.temperature,
                when_exhausted=data.when_exhausted,
                restart=data.restart,
            )
        )
    return planned


def check_paths(config: Any, step: int) -> None:
    """Whether the paths on this machine that the stage of `step` reads are there: at once, as nothing is opened.

    Error (InputError): one is not.
    """
    stage = next(stage for stage in plan_stages(config) if stage.start <= step < stage.stop)
    for source in stage.sources:
        dataset = source.dataset
        is_tokens = isinstance(dataset, TokenPath)
        paths, key = ([dataset.path], dataset.key) if is_tokens else (paths_of(dataset), "dataset.text_files")
        with whole_keys(source.at):
            for path in paths:
                if not is_remote(path) and not Path(path).expanduser().exists():
                    raise no_such_path(key, path)


def identities(datasets: Sequence[Any], seed: int, sequence_length: int) -> list[str]:
    """A name for each dataset: equal across stages for equal data, seed and sequence length, unique within one."""
    manner = {"seed": seed, "sequence_length": sequence_length}
    texts = [json.dumps((describe(d) or {}) | manner, sort_keys=True, default=str) for d in datasets]
    return [f"{text} {texts[:number].count(text)}" for number, text in enumerate(texts)]


MANNER = (
    "dtype",
    "max_tokens",
    "shuffle_files",
    "packing",
    "streaming",
    "debug_max_samples",
    "seed",
    "sequence_length",
)
"""What `identities` hold of how data are read; all else says which data they are."""


def differences(new: SourcePlan, old: SourcePlan) -> list[str]:
    """Why `new` does not go on where `old` stopped, ``seed 7, not 42``; none where it does, or is other data."""
    now, then = (json.loads(source.name[: source.name.rindex(" ")]) for source in (new, old))
    if new.dataset is None or {k: v for k, v in (now | then).items() if now.get(k) != then.get(k) and k not in MANNER}:
        return []
    return [f"{key.replace('_', ' ')} {now[key]}, not {then[key]}" for key in MANNER if now.get(key) != then.get(key)]


def datasets_of(dataset: Any, stage: int) -> list[tuple[str, Any]]:
    """The datasets of a stage, those of its mixture or the one it has, each with its whole key in the config."""
    at = f"data_stages.{stage}.data.dataset"
    if (mixture := getattr(dataset, "mixture", None)) is None:
        return [(at, dataset)]
    return [(f"{at}.mixture.{number}", each) for number, each in enumerate(mixture)]


@contextmanager
def whole_keys(at: str) -> Iterator[None]:
    """What is wrong with ``dataset.some_key`` is told with the dataset's whole key `at` in that place."""
    try:
        yield
    except InputError as error:
        if not str(error).startswith("dataset."):
            raise
        raise InputError(at + str(error).removeprefix("dataset")) from error


def split(dataset: Any, at: str) -> list[tuple[float | str, Any]]:
    """The sources of the dataset `at` a key, each with its share of it, or the measure that it shares by."""
    with whole_keys(at):
        paths = token_paths(dataset)
    if paths is not None:
        unknown: float | str = "tokens" if len(paths) > 1 else 1.0
        return [(unknown if share is None else share, path) for share, path in paths]
    if isinstance(getattr(dataset, "text_files", None), dict):
        return [
            (weight, _OnePath(path, dataset.text_column_name, dataset.packing, dataset.streaming))
            for path, weight in dataset.text_files.items()
        ]
    return [(1.0, dataset)]


def short_labels(stages: Sequence[Sequence[Any]]) -> list[str]:
    """What people call each source of each stage: the end of its path, as much of it as tells all sources apart.

    The same data have one label in all stages, whatever their seed and sequence length.
    """
    names = [name for sources in stages for name in identities(sources, 0, 0)]
    full = dict(zip(names, (title(source).rstrip("/").split("/") for sources in stages for source in sources)))
    labels: dict[str, str] = {}
    for name, parts in full.items():
        others = [other for known, other in full.items() if known != name and other != parts]
        size = next(
            n for n in range(1, len(parts) + 1) if n == len(parts) or parts[-n:] not in (o[-n:] for o in others)
        )
        label = "/".join(parts[-size:])
        taken = list(labels.values())
        labels[name] = next(
            new for n in range(1, len(full) + 1) if (new := label if n == 1 else f"{label}-{n}") not in taken
        )
    return [labels[name] for name in names]


def title(dataset: Any) -> str:
    """The path or name of a source."""
    variant = kind(dataset)
    if variant == "null":
        return "random"
    found = dataset.path if variant == "tokens" else getattr(dataset, variant)
    return found if isinstance(found, str) else "+".join(found)


@dataclass(frozen=True)
class _OnePath:
    """One entry of a map path → share."""

    text_files: str
    text_column_name: str = "text"
    packing: str = "windows"
    streaming: Any = None


def describe(dataset: Any) -> dict[str, Any] | None:
    """The keys of a dataset's config that say which data it is."""
    if dataset is None:
        return None
    if isinstance(dataset, TokenPath):
        told = asdict(dataset)
        told["path"] = _place(dataset.path)
        return {key: told[key] for key in ("path", "dtype", "max_tokens", "shuffle_files", "packing")}
    keys = {
        "corpus": ["corpus", "streaming"],
        "text_files": ["text_files", "text_column_name", "streaming"],
        "source": ["source", "kwargs"],
        "hf_dataset_or_datasets": [
            "hf_dataset_or_datasets",
            "hf_dataset_splits",
            "hf_dataset_config_name",
            "text_column_name",
            "streaming",
        ],
    }
    sft = ["debug_max_samples", "prompt_column_name", "completion_column_name", "messages_column_name"]
    named = [*keys[kind(dataset)], "packing", *(sft if has_answers(dataset) else [])]
    told = {key: getattr(dataset, key, None) for key in named}
    if kind(dataset) == "text_files":
        paths = dataset.text_files
        told["text_files"] = _place(paths) if isinstance(paths, str) else [_place(path) for path in paths]
    return told


def _place(path: str) -> str:
    """One name for a path, however it is written."""
    return path.rstrip("/") if is_remote(path) else os.path.abspath(os.path.expanduser(path))


TEXT_KINDS = ("corpus", "text_files", "hf_dataset_or_datasets")


def kind(dataset: Any) -> str:
    """The key that tells the variant: corpus, text_files, hf_dataset_or_datasets, tokens, source, or "null"."""
    if dataset is None:
        return "null"
    if isinstance(dataset, TokenPath):
        return "tokens"
    for name in (*TEXT_KINDS, "source"):
        if getattr(dataset, name, None) is not None:
            return name
    raise NotSupportedYet(f"dataset of kind {type(dataset).__name__}")


def has_answers(dataset: Any) -> bool:
    """Whether these are prompts and answers, of which only answers are learnt."""
    return getattr(dataset, "sft_dataloader", False)


def texts_of(dataset: Any, remote: RemoteData | None = None, tokenizer: Tokenizer | None = None) -> Texts | None:
    """The documents of a dataset; None if it has tokens only (random, a user's own). `remote`: for other machines.

    Prompts and answers are examples (examples.py); for conversations the `tokenizer` tells how they are written.

    Errors (InputError): nothing there, not readable, the hub cannot be reached.
    """
    if has_answers(dataset):
        names = (dataset.prompt_column_name, dataset.completion_column_name, dataset.messages_column_name)
        rows = partial(_rows_of, dataset, remote)
        return ExampleTexts(rows, Columns(*names), dataset.debug_max_samples, tokenizer)
    return _rows_of(dataset, remote, None)


def _rows_of(dataset: Any, remote: RemoteData | None, hook: RowHook | None) -> Any:
    variant, column = kind(dataset), getattr(dataset, "text_column_name", None) or "text"
    if variant == "corpus":
        return python_stdlib()
    if variant == "text_files":
        paths = dataset.text_files
        names: Sequence[str] = [paths] if isinstance(paths, str) else list(paths)
        files = [file for path in names for file in find_files(as_path(path, remote), "dataset.text_files")]
        if column != "text" and not any(map(has_rows, files)):
            raise InputError(f"dataset.text_column_name: expected files with columns for '{column}', found text alone")
        return FileTexts(", ".join(map(str, names)), files, column, hook=hook)
    if variant == "hf_dataset_or_datasets":
        from .hub_texts import HubTexts

        return HubTexts(
            dataset.hf_dataset_or_datasets,
            dataset.hf_dataset_splits or "train",
            dataset.hf_dataset_config_name,
            column,
            hook,
            streaming=streams(dataset),
        )
    return None


def streams(dataset: Any) -> bool:
    """Whether a dataset is read as a stream."""
    return getattr(dataset, "streaming", None) is not None
