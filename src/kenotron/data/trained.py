"""The tokenizer of a run: loaded by name, or trained on the first stage's own text and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kenotron.config.errors import InputError

from .cache import cache_root, cached_folder, content_hash
from .plan import TEXT_KINDS, Stage, kind, texts_of
from .progress import Report
from .split import held_out_limit, is_held_out
from .texts import Texts
from .tokenizer import SPLIT_PATTERN, Tokenizer, load_tokenizer, train_byte_level_bpe

TRAINING_CHARACTERS = 200_000_000
"""Most text that a tokenizer is trained on; more changes little and costs memory."""


def tokenizer_of(config: Any, stages: Sequence[Stage], report: Report, folder: Path | None = None) -> Tokenizer | None:
    """The run's tokenizer; None where none is named and all data are tokens already.

    A run that continues gives the `folder` its tokenizer was saved in: it is loaded from there, whatever the data or
    the place that it first came from have become since. No such folder: the run had none, and nothing changes.

    Errors (InputError): not found; hub unreachable.
    """
    section = config.tokenizer
    if folder is not None and folder.is_dir():
        return load_tokenizer(folder)
    has_text = any(kind(source.dataset) in TEXT_KINDS for stage in stages for source in stage.sources)
    if section.train is not None:
        opened = (texts_of(source.dataset, config.remote_data) for source in stages[0].sources)
        texts = [found for found in opened if found is not None]
        return trained_tokenizer(texts, section.train.vocab_size, config.tokens.val_fraction, report)
    if section.tokenizer_name_or_path is None:
        return None
    try:
        return load_tokenizer(section.tokenizer_name_or_path, section.tokenizer_revision)
    except InputError as error:
        if has_text:
            raise
        report(f"no tokenizer in this run, which its data do not need: {error}")
        return None


def trained_tokenizer(texts: Sequence[Texts], vocab_size: int, val_fraction: float, report: Report) -> Tokenizer:
    """A byte-level BPE trained on the documents of `texts` that are not held out; kept by content."""
    contents = [content_hash(text) for text in texts]
    recipe = f"byte-level-bpe 2 {SPLIT_PATTERN} {TRAINING_CHARACTERS} {vocab_size} {val_fraction!r} {contents}"
    path = cache_root() / "tokenizers" / hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()

    def build(folder: Path) -> None:
        names = ", ".join(text.name for text in texts)
        report(f"training a tokenizer of {vocab_size:,} entries on {names}")
        train_byte_level_bpe(training_texts(texts, val_fraction), vocab_size).save(folder)

    cached_folder(path, build, report, "training a tokenizer")
    tokenizer = load_tokenizer(path)
    tokenizer.name = f"byte-level BPE trained on {', '.join(text.name for text in texts)}"
    return tokenizer


def training_texts(texts: Sequence[Texts], val_fraction: float) -> Iterator[str]:
    """Documents that are not held out, up to `TRAINING_CHARACTERS`."""
    left = TRAINING_CHARACTERS
    for source in texts:
        limit = held_out_limit(source.documents(), val_fraction)
        for text, *_ in source.documents():
            if left <= 0:
                return
            if not is_held_out(text, limit):
                left -= len(text)
                yield text
