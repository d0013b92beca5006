"""The tokenizer of a run: loaded by name, or trained on the first stage's own text and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from kenotron.config.errors import InputError

from .cache import cache_root, cached_folder, content_hash
from .plan import TEXT_KINDS, Stage, kind, streams, texts_of, whole_keys
from .progress import Report
from .split import held_out_limit, is_held_out, share_of_hashes
from .stream import all_parts
from .texts import StreamTexts, Texts
from .tokenizer import SPLIT_PATTERN, Tokenizer, is_a_path, load_tokenizer, train_byte_level_bpe

TRAINING_CHARACTERS = 200_000_000
"""Most text that a tokenizer is trained on; more changes little and costs memory."""


def tokenizer_of(config: Any, stages: Sequence[Stage], report: Report, folder: Path | None = None) -> Tokenizer | None:
    """The run's tokenizer; None where none is named and all data are tokens already.

    A run that continues gives the `folder` its tokenizer was saved in: it is loaded from there, whatever the data or
    the place that it first came from have become since. No such folder: the run had none, and nothing changes.

    Errors (InputError): not found; hub unreachable. Where all data are tokens, a name of the hub that cannot be had is
    told, no more: nanotron's files name one in any case.
    """
    section = config.tokenizer
    has_text = any(kind(source.dataset) in TEXT_KINDS for stage in stages for source in stage.sources)
    if section.tokenizer_max_length is not None and not has_text:
        report("warning: tokenizer.tokenizer_max_length cuts nothing: no stage reads text")
    if folder is not None and folder.is_dir():
        return load_tokenizer(folder)
    if section.train is not None:
        texts = []
        for source in stages[0].sources:
            with whole_keys(source.at):
                if (found := texts_of(source.dataset, config.remote_data)) is not None:
                    texts.append((found, streams(source.dataset)))
        with whole_keys("data_stages.0.data.dataset"):
            return trained_tokenizer(texts, section.train.vocab_size, config.tokens.val_fraction, report)
    if section.tokenizer_name_or_path is None:
        return None
    try:
        return load_tokenizer(section.tokenizer_name_or_path, section.tokenizer_revision)
    except InputError as error:
        if has_text or is_a_path(section.tokenizer_name_or_path):
            raise
        report(f"warning: no tokenizer in this run, which its data do not need: {error}")
        return None


def trained_tokenizer(
    texts: Sequence[tuple[Texts, bool]], vocab_size: int, val_fraction: float, report: Report
) -> Tokenizer:
    """A byte-level BPE trained on the documents of `texts` that are not held out; kept by content.

    Those that are streams are read only as far as they are trained on, and known by names, sizes and times of files.
    """
    contents = [
        cast(StreamTexts, text).fingerprint(times=True) if stream else content_hash(text) for text, stream in texts
    ]
    names = ", ".join(text.name for text, _ in texts)
    recipe = f"byte-level-bpe 2 {SPLIT_PATTERN} {TRAINING_CHARACTERS} {vocab_size} {val_fraction!r} {contents}"
    path = cache_root() / "tokenizers" / hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()

    def build(folder: Path) -> None:
        report(f"training a tokenizer of {vocab_size:,} entries on {names}")
        train_byte_level_bpe(training_texts(texts, val_fraction), vocab_size).save(folder)

    cached_folder(path, build, report, "training a tokenizer")
    tokenizer = load_tokenizer(path)
    tokenizer.name = f"byte-level BPE trained on {names}"
    return tokenizer


def training_texts(texts: Sequence[tuple[Texts, bool]], val_fraction: float) -> Iterator[str]:
    """Documents that are not held out, up to `TRAINING_CHARACTERS`."""
    left = TRAINING_CHARACTERS
    for source, stream in texts:
        limit = share_of_hashes(val_fraction) if stream else held_out_limit(source.documents(), val_fraction)
        for text, *_ in all_parts(cast(StreamTexts, source)) if stream else source.documents():
            if left <= 0:
                return
            if not is_held_out(text, limit):
                left -= len(text)
                yield text
