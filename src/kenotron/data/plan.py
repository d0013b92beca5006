"""The stages of a run and their sources, as the config alone tells them: nothing is opened here.

    data_stages:                                     stage 0: steps 1-9      {a: 3, b: 1}
      - {start_training_step: 1,  mixture a 3, b 1}  stage 1: steps 10-15    {a: 1}
      - {start_training_step: 10, only a}            16 samples a step: stage 1 takes up `a` at its sample 108

Tokenized files that share by their length are the exception: how long they are, only they know.

A source that comes again in a later stage (same data, seed and sequence length) goes on where it stopped, so that
nothing is read twice before all was read once. How far it got is arithmetic (`order.counts`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.kernels.hashing import derive_key

from .order import counts, huffman
from .progress import Report
from .ramps import Level, length_of_step, lengths, level_of_sample, level_of_step, levels
from .texts import FileTexts, Texts, find_files, python_stdlib
from .token_folder import TokenPath, open_folder, open_samples, token_paths, training_samples


@dataclass(frozen=True)
class SourcePlan:
    """One source of a stage.

    `dataset` is its config; `key` seeds its shuffling; `offset` is the number of samples that earlier stages draw.
    """

    weight: float
    dataset: Any
    key: int
    offset: int


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


def plan_stages(config: Any, report: Report = print) -> list[Stage]:
    """The stages of `config` in order of their start."""
    tokens, stages = config.tokens, sorted(config.data_stages, key=lambda stage: stage.start_training_step)
    starts = [stage.start_training_step for stage in stages] + [tokens.train_steps + 1]
    drawn: Counter[str] = Counter()
    numbers: dict[str, int] = {}
    planned: list[Stage] = []
    for number, stage in enumerate(stages):
        start, stop = starts[number], max(starts[number], min(starts[number + 1], tokens.train_steps + 1))
        length = stage.sequence_length or tokens.sequence_length
        weighted = list(
            flatten(stage.data.dataset, partial(samples_of, config=config, sequence_length=length, report=report))
        )
        names = identities([dataset for _, dataset in weighted], stage.data.seed, length)
        # Shuffling depends on the place of a source in the config, not on its path: data may move.
        keys = [derive_key("order", stage.data.seed, numbers.setdefault(name, len(numbers))) for name in names]
        sources = tuple(
            SourcePlan(weight, dataset, key, drawn[name]) for (weight, dataset), key, name in zip(weighted, keys, names)
        )
        one = Stage(
            number=number,
            name=stage.name,
            start=start,
            stop=stop,
            sequence_length=length,
            levels=levels(stage.batch_size_ramp, config.global_batch_size),
            lengths=lengths(stage.sequence_length_ramp, length),
            seed=stage.data.seed,
            workers=stage.data.num_loading_workers,
            sources=sources,
        )
        planned.append(one)
        tree = huffman([weight for weight, _ in weighted])
        for s, count in counts(tree, one.samples).items():
            drawn[names[s]] += count
    return planned


def identities(datasets: Sequence[Any], seed: int, sequence_length: int) -> list[str]:
    """A name for each dataset: equal across stages for equal data, seed and sequence length, unique within one."""
    texts = [json.dumps([describe(d), seed, sequence_length], sort_keys=True, default=str) for d in datasets]
    return [f"{text} {texts[:number].count(text)}" for number, text in enumerate(texts)]


def samples_of(path: TokenPath, config: Any, sequence_length: int, report: Report) -> int:
    """Training samples of tokenized files."""
    folder = open_folder(path, sequence_length, config.model.architecture.vocab_size, config.general.seed)
    samples = open_samples(folder, path, 0, report)
    count, _ = training_samples(samples, path, config)
    if count == 0:
        raise InputError(
            f"{path.path}: expected at least {sequence_length + 1} tokens to train on (sequence_length + 1), "
            f"found {folder.describe()}"
        )
    return count


def flatten(dataset: Any, length: Callable[[TokenPath], int]) -> Iterator[tuple[float, Any]]:
    """The sources of a dataset, each with its weight; nested weights multiply.

    Tokenized files without shares weigh what `length` says.
    """
    if (mixture := getattr(dataset, "mixture", None)) is not None:
        for part in mixture:
            inner = list(flatten(part, length))
            total = sum(weight for weight, _ in inner)
            yield from ((part.weight * weight / total, one) for weight, one in inner)
    elif (paths := token_paths(dataset)) is not None:
        for share, path in paths:
            yield share if share is not None else 1.0 if len(paths) == 1 else length(path), path
    elif isinstance(getattr(dataset, "text_files", None), dict):
        for path, weight in dataset.text_files.items():
            if not weight > 0:
                raise InputError(f"dataset.text_files: the share of '{path}' must be above 0, found {weight}")
            yield weight, _OnePath(path, dataset.text_column_name, dataset.packing)
    else:
        yield 1.0, dataset


@dataclass(frozen=True)
class _OnePath:
    """One entry of a map path → share."""

    text_files: str
    text_column_name: str = "text"
    packing: str = "windows"


def describe(dataset: Any) -> dict[str, Any] | None:
    """The keys of a dataset's config that say which data it is."""
    if dataset is None:
        return None
    if isinstance(dataset, TokenPath):
        told = asdict(dataset)
        return {key: told[key] for key in ("key", "path", "dtype", "max_tokens", "shuffle_files", "packing")}
    keys = {
        "corpus": ["corpus"],
        "text_files": ["text_files", "text_column_name"],
        "source": ["source", "kwargs"],
        "hf_dataset_or_datasets": [
            "hf_dataset_or_datasets",
            "hf_dataset_splits",
            "hf_dataset_config_name",
            "text_column_name",
        ],
    }
    return {key: getattr(dataset, key, None) for key in (*keys[kind(dataset)], "packing")}


TEXT_KINDS = ("corpus", "text_files", "hf_dataset_or_datasets")


def kind(dataset: Any) -> str:
    """The key that tells the variant: corpus, text_files, hf_dataset_or_datasets, tokens, source, or "null"."""
    if dataset is None:
        return "null"
    if isinstance(dataset, TokenPath):
        return "tokens"
    if getattr(dataset, "sft_dataloader", False):
        raise NotSupportedYet("dataset.sft_dataloader (fine-tuning on prompts and answers)")
    for name in (*TEXT_KINDS, "source"):
        if getattr(dataset, name, None) is not None:
            return name
    raise NotSupportedYet(f"dataset of kind {type(dataset).__name__}")


def texts_of(dataset: Any) -> Texts | None:
    """The documents of a dataset; None if it has tokens only (random, a user's own).

    Errors (InputError): nothing there, not readable, the hub cannot be reached.
    """
    variant = kind(dataset)
    if variant == "corpus":
        return python_stdlib()
    if variant == "text_files":
        paths = dataset.text_files
        names: Sequence[str] = [paths] if isinstance(paths, str) else list(paths)
        files = [file for path in names for file in find_files(path, "dataset.text_files")]
        return FileTexts(", ".join(map(str, names)), files, dataset.text_column_name)
    if variant == "hf_dataset_or_datasets":
        from .hub_texts import HubTexts

        return HubTexts(
            dataset.hf_dataset_or_datasets,
            dataset.hf_dataset_splits or "train",
            dataset.hf_dataset_config_name,
            dataset.text_column_name or "text",
        )
    return None
