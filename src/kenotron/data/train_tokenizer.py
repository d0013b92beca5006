"""The tokenizer of a run: loaded by name, or trained on the first stage's own text and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from kenotron.config import Config
from kenotron.config.errors import InputError, is_a_path
from kenotron.data.cached_folder import cache_entry, cached_folder
from kenotron.data.source import RunSettings, TextSpec
from kenotron.data.stage_plan import SourcePlan, StagePlan, complete_keys
from kenotron.text.tokenizer import SPLIT_PATTERN, TextTokenizer, load_tokenizer, train_byte_level_bpe

TRAINING_CHARACTERS = 200_000_000
"""Most text that a tokenizer is trained on; more changes little and costs memory."""


def tokenizer_of(
    config: Config, run: RunSettings, stages: Sequence[StagePlan], folder: Path | None = None
) -> TextTokenizer | None:
    """The run's tokenizer; None where none is named and all data are tokens already.

    A run that continues passes the `folder` its tokenizer was saved in: it is loaded from there, even if the data or
    its first source have changed since. A missing folder means that the run had none, and changes nothing.

    Errors (InputError): not found; hub unreachable. Where all data are tokens, a name of the hub that cannot be loaded
    is only warned of: nanotron's files name one in any case.
    """
    section = config.tokenizer
    has_text = any(isinstance(source.spec, TextSpec) for stage in stages for source in stage.sources)
    if section.tokenizer_max_length is not None and not has_text:
        run.report("warning: tokenizer.tokenizer_max_length cuts nothing: no stage reads text")
    if folder is not None and folder.is_dir():
        return load_tokenizer(folder)
    if section.train is not None:
        return trained_tokenizer(stages[0].sources, section.train.vocab_size, run)
    if section.tokenizer_name_or_path is None:
        return None
    try:
        return load_tokenizer(section.tokenizer_name_or_path, section.tokenizer_revision)
    except InputError as error:
        if has_text or is_a_path(section.tokenizer_name_or_path):
            raise
        run.report(f"warning: no tokenizer in this run, which its data do not need: {error}")
        return None


def trained_tokenizer(sources: Sequence[SourcePlan], vocab_size: int, run: RunSettings) -> TextTokenizer:
    """A byte-level BPE trained on the documents of `sources` that are not held out; kept by their content.

    Errors (InputError): a source that cannot be read.
    """
    specs, keys = [], []
    for source in sources:
        if isinstance(source.spec, TextSpec):
            with complete_keys(source.at):
                specs.append(source.spec)
                keys.append(source.spec.content_key(run))
    names, contents = ", ".join(name for name, _ in keys), [content for _, content in keys]
    recipe = f"byte-level-bpe 2 {SPLIT_PATTERN} {TRAINING_CHARACTERS} {vocab_size} {run.val_fraction!r} {contents}"
    path = cache_entry("tokenizers", recipe)

    def build(folder: Path) -> None:
        run.report(f"training a tokenizer of {vocab_size:,} entries on {names}")
        train_byte_level_bpe(training_texts(specs, run), vocab_size).save(folder)

    with complete_keys("data_stages.0.data.dataset"):
        cached_folder(path, build, run.report, "training a tokenizer")
    tokenizer = load_tokenizer(path)
    tokenizer.name = f"byte-level BPE trained on {names}"
    return tokenizer


def training_texts(specs: Sequence[TextSpec], run: RunSettings) -> Iterator[str]:
    """Documents that are not held out, up to `TRAINING_CHARACTERS`."""
    left = TRAINING_CHARACTERS
    for text in chain.from_iterable(spec.training_texts(run) for spec in specs):
        if left <= 0:
            return
        left -= len(text)
        yield text
