"""Train a run's own tokenizer on the text of its first stage, and keep it."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from kenotron.data.cached_folder import cache_entry, cached_folder
from kenotron.data.source import RunSettings, TextSpec
from kenotron.data.stage_plan import SourcePlan, complete_keys
from kenotron.text.byte_level_bpe import SPLIT_PATTERN, first_characters, train_byte_level_bpe
from kenotron.text.tokenizer import TextTokenizer, load_tokenizer

TRAINING_CHARACTERS = 200_000_000
"""Limit of the characters that a tokenizer is trained on; more change little and cost memory."""


def trained_tokenizer(sources: Sequence[SourcePlan], vocab_size: int, run: RunSettings) -> TextTokenizer:
    """Return a byte-level BPE trained on the documents of `sources` that are not held out, cached by their content.

    Raises InputError if a source cannot be read.
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
        texts = chain.from_iterable(spec.training_texts(run) for spec in specs)
        train_byte_level_bpe(first_characters(texts, TRAINING_CHARACTERS), vocab_size).save(folder)

    with complete_keys("data_stages.0.data.dataset"):
        cached_folder(path, build, run.report, "training a tokenizer")
    tokenizer = load_tokenizer(path)
    tokenizer.name = f"byte-level BPE trained on {names}"
    return tokenizer
