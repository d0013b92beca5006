"""Text that the run tokenizes once, into the cache (this file), or while reading (`stream.py`).

    text_files: {a: 3, b: 1}  ─▶  TextDataset a, TextDataset b  ─open─▶  CachedText: windows of the cached tokens, or,
                                                                        with `packing: best_fit`, rows of documents

Prompts and answers are text, too: only answers have a loss, and documents are masked from each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from kenotron.config.data_stages import EmbeddedCorpus, PretrainDataset, SFTDataset, SFTFiles, TextFiles
from kenotron.config.errors import InputError, counted
from kenotron.config.remote_data import RemoteData
from kenotron.data.cache import TokenCache, chosen_hash, content_hash, open_tokens
from kenotron.data.source import Opening, RunSettings, SampleRange, TextSpec, TokenSource
from kenotron.data.sources.packed_rows import PackedRows
from kenotron.data.sources.stream import all_documents, check_ids, open_stream
from kenotron.data.sources.token_folder import TokenFolder
from kenotron.data.sources.windows import HeldOutWindows
from kenotron.storage.paths import as_path, one_spelling
from kenotron.text.documents import DocumentSource, RowHook, StreamableDocuments
from kenotron.text.encode import EncodeRules
from kenotron.text.file_documents import FileDocuments, find_files, has_rows, python_stdlib, unread_files
from kenotron.text.hash_split import hash_threshold, is_held_out, threshold_of_fraction
from kenotron.text.sft import Columns, SftDocuments
from kenotron.text.tokenizer import TextTokenizer

HubSection = PretrainDataset | SFTDataset
TextSection = EmbeddedCorpus | TextFiles | SFTFiles | HubSection

NOT_DATA = {
    "weight",
    "max_epochs",
    "sft_dataloader",
    "dataset_processing_num_proc_per_process",
    "dataset_overwrite_cache",
    "on_bad_document",
}
"""Keys that change neither the samples of a source nor their order, or only make the run end with an error."""


# ---- from the config ---------------------------------------------------------------------------------------


def specs(section: TextSection) -> list[tuple[float | str, TextDataset]]:
    """Return the sources of a dataset of text: one, or one for each path of a map path → share."""
    if isinstance(section, TextFiles) and isinstance(section.text_files, dict):
        paths = section.text_files.items()
        return [(share, TextDataset(section.model_copy(update={"text_files": path}))) for path, share in paths]
    return [(1.0, TextDataset(section))]


@dataclass(frozen=True)
class TextDataset(TextSpec):
    """A source of text as described by its section."""

    section: TextSection

    @property
    def has_answers(self) -> bool:
        """Whether the documents are prompts and answers."""
        return isinstance(self.section, SFTDataset | SFTFiles)

    @property
    def is_stream(self) -> bool:  # type: ignore[override]
        """Whether the text is tokenized while it is read."""
        return not isinstance(self.section, SFTDataset | SFTFiles) and self.section.streaming is not None

    @property
    def title(self) -> str:
        """The corpus, the paths, or the names on the hub."""
        if isinstance(self.section, EmbeddedCorpus):
            return self.section.corpus
        if isinstance(self.section, TextFiles | SFTFiles):
            return "+".join(_paths(self.section))
        names = self.section.hf_dataset_or_datasets
        return names if isinstance(names, str) else "+".join(names)

    def identity(self) -> dict[str, object]:
        """Return all keys that change the samples, with normalized paths."""
        found: dict[str, object] = {key: value for key, value in self.section if key not in NOT_DATA}
        if isinstance(self.section, TextFiles | SFTFiles):
            places = [one_spelling(path) for path in _paths(self.section)]
            found["text_files"] = places[0] if isinstance(self.section.text_files, str) else places
        return found

    def paths(self) -> tuple[str, Sequence[str]]:
        """Return the paths of `text_files`."""
        return "dataset.text_files", _paths(self.section) if isinstance(self.section, TextFiles | SFTFiles) else ()

    def check_files(self) -> None:
        """List the files. Raises InputError if a folder holds no text."""
        key, paths = self.paths()
        for path in paths:
            find_files(path, key)

    def documents(self, remote: RemoteData | None = None, tokenizer: TextTokenizer | None = None) -> DocumentSource:
        """Return the documents. Prompts and answers are examples (text/sft.py); the `tokenizer` renders conversations.

        Raises InputError if the data are missing or unreadable, or the hub is unreachable.
        """
        section = self.section
        if not isinstance(section, SFTDataset | SFTFiles):
            return self._rows(remote, None)
        names = (section.prompt_column_name, section.completion_column_name, section.messages_column_name)
        return SftDocuments(partial(self._rows, remote), Columns(*names), section.debug_max_samples, tokenizer)

    def _rows(self, remote: RemoteData | None, hook: RowHook | None) -> StreamableDocuments:
        section = self.section
        if isinstance(section, EmbeddedCorpus):
            return python_stdlib()
        plain = None if isinstance(section, SFTDataset | SFTFiles) else section
        column = "text" if plain is None else plain.text_column_name
        skip_bad = plain is not None and plain.on_bad_document == "skip"
        advice = "" if plain is None else "; dataset.on_bad_document: skip leaves it out"
        if isinstance(section, TextFiles | SFTFiles):
            names = _paths(section)
            files = [file for path in names for file in find_files(as_path(path, remote), "dataset.text_files")]
            if column != "text" and not any(map(has_rows, files)):
                raise InputError(
                    f"dataset.text_column_name: expected files with columns for '{column}', found only text"
                )
            return FileDocuments(", ".join(names), files, column, hook=hook, skip_bad=skip_bad, advice=advice)
        from kenotron.text.hub_datasets import HubDocuments

        which = (section.hf_dataset_or_datasets, section.hf_dataset_splits, section.hf_dataset_config_name)
        return HubDocuments(*which, column, hook, self.is_stream, skip_bad, advice)

    # ---- held-out documents ----

    def content_key(self, run: RunSettings) -> tuple[str, str]:
        """Return the title and a key of the content, or for a stream of its files' names, sizes and times."""
        texts = self.documents(run.config.remote_data)
        if self.is_stream:
            return texts.name, cast(StreamableDocuments, texts).fingerprint(times=True)
        return texts.name, content_hash(texts)

    def training_texts(self, run: RunSettings) -> Iterator[str]:
        """Yield the documents that are not held out."""
        texts = self.documents(run.config.remote_data)
        if self.is_stream:  # read lazily, so that not all of it is read twice
            pieces, limit = all_documents(cast(StreamableDocuments, texts)), threshold_of_fraction(run.val_fraction)
        else:
            pieces, limit = texts.documents(), hash_threshold(texts.documents(), run.val_fraction)
        return (piece.text for piece in pieces if not is_held_out(piece.text, limit))

    def reserved_hash(self, run: RunSettings) -> int | None:
        """Return the smallest hash of a document if no other document is held out, else None."""
        if self.is_stream:
            return None
        return chosen_hash(self.documents(run.config.remote_data, run.tokenizer), run.val_fraction)

    # ---- opening ----

    def open(self, opening: Opening) -> TokenSource:
        """Tokenize the text, or map the tokens of an earlier run; a stream is only opened."""
        run, section = opening.run, self.section
        texts = self.documents(run.config.remote_data, run.tokenizer)
        if run.tokenizer is None:
            raise InputError(f"{texts.name} is text, but the run has no tokenizer")
        for line in filter(None, (unread_files(as_path(path, run.config.remote_data)) for path in self.paths()[1])):
            run.report(line)
        rules = EncodeRules(run.eos, run.config.tokenizer.tokenizer_max_length, examples=self.has_answers)
        if not isinstance(section, SFTDataset | SFTFiles) and section.streaming is not None:
            streamed = cast(StreamableDocuments, texts)
            streamed.tell = None if isinstance(section, EmbeddedCorpus) else run.report
            return open_stream(streamed, run.tokenizer, rules, section.streaming, opening)
        chosen = opening.reserved - {chosen_hash(texts, run.val_fraction)} if opening.reserved else frozenset()
        how = (1, False)  # number of processes, and whether to overwrite the cache
        if isinstance(section, HubSection):
            how = section.dataset_processing_num_proc_per_process, section.dataset_overwrite_cache
        cache = open_tokens(texts, run.tokenizer, rules, run.val_fraction, *how, run.report, run.stop, chosen)
        check_ids(texts.name, max(cache.train.max_id, cache.validation.max_id), run.tokenizer, run.vocab_size)
        length = opening.sequence_length
        train: TokenSource = TokenFolder(texts.name, [cache.train], length, run.vocab_size, watched=False)
        held_out: TokenSource = HeldOutWindows(texts.name, cache.validation, length)
        if section.packing == "best_fit":
            # The rest of an example that is cut has no prompt, so it is left out.
            pack = partial(PackedRows, texts.name, sequence_length=length, padding=run.padding, report=run.report)
            train = pack(parts=[cache.train], keep_rest=not self.has_answers)
            held_out = pack(parts=[cache.validation], keep_rest=False) if self.has_answers else held_out
        return CachedText(train, held_out, cache, rules.examples)


def _paths(section: TextFiles | SFTFiles) -> list[str]:
    return [section.text_files] if isinstance(section.text_files, str) else list(section.text_files)


# ---- open --------------------------------------------------------------------------------------------------


class CachedText(SampleRange):
    """Tokenized documents of the cache, split by the hash of their text; prompts and answers are masked."""

    def __init__(self, train: TokenSource, held_out: TokenSource, cache: TokenCache, masks_documents: bool) -> None:
        super().__init__(train, 0, len(train), held_out)
        self.cache, self.masks_documents = cache, masks_documents
        self.size_in_bytes = cache.train.bytes
        if len(held_out):
            held_out.bytes_per_token = cache.validation.bytes / len(cache.validation.tokens)

    @property
    def fingerprint(self) -> str:
        """Return a key of the content of the texts and of their packing."""
        return f"{self.cache.content} best_fit" if isinstance(self.whole, PackedRows) else self.cache.content

    def describe(self) -> str:
        """Return documents, tokens, bytes and samples of both splits, for the console."""
        train, held, skipped = self.cache.train, self.cache.validation, self.cache.skipped
        packing = f"; {self.whole.describe()}" if isinstance(self.whole, PackedRows) else ""
        noun, reason = ("document", "as not readable") if train.loss is None else ("row", "without an answer")
        left_out = f", {counted(skipped, noun)} left out {reason}" if skipped else ""
        with_loss = "" if train.loss is None else f" ({np.count_nonzero(train.loss):,} with a loss)"
        rule = " (the one with the smallest hash: none below tokens.val_fraction)" if self.cache.smallest_hash else ""
        return (
            f"{self.name}: {counted(len(train.ends), 'document')}, {len(train.tokens):,} tokens{with_loss}, "
            f"{train.bytes:,} bytes, "
            f"{counted(len(self), 'sample')}{packing}; held out: {counted(len(held.ends), 'document')}, "
            f"{len(held.tokens):,} tokens, {held.bytes:,} bytes{rule}{left_out}; cache: {self.cache.path}"
        )

    def found(self) -> str:
        """Return the tokens and documents of the training split, for errors."""
        held = len(self.cache.validation.ends)
        rest = f" (and {counted(held, 'document')} held out by tokens.val_fraction)" if held else ""
        return f"{len(self.cache.train.tokens):,} in {counted(len(self.cache.train.ends), 'document')}{rest}"
