"""Read documents from Hugging Face datasets: rows of a hub repository or of a local folder.

    hf_dataset_or_datasets: org/name                      all its rows
    hf_dataset_or_datasets: {org/a: 1.0, folder/b: 0.1}   all rows of a, then the first int(0.1 * rows) of b

`datasets`, which takes a second to import, is imported only when rows are read. Cached tokens are found by the commit
in the local hub cache, so a second run neither imports it nor queries the hub for a newer commit;
`dataset_overwrite_cache: true` does.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from kenotron.config.errors import InputError
from kenotron.storage.hub import cached_revision, configure_hub, first_line, offline_variable, without_hub
from kenotron.text.documents import (
    LONGEST_CHUNK,
    YOUNG,
    ByteRange,
    DocumentChunk,
    MayBeBad,
    RowHook,
    missing_column,
    split_long_chunk,
    texts_of_row,
)
from kenotron.text.tables import rows_at_once

KEY = "dataset.hf_dataset_or_datasets"

SILENCE_S = 30.0
"""Seconds after which a request to the hub fails if nothing arrives."""


class HubDocuments(MayBeBad):
    """Rows of several datasets, one after the other; `column` has the text.

    With `skip_bad`, a row without text is left out and counted; otherwise it is an error.
    """

    def __init__(
        self,
        names: str | Sequence[str] | dict[str, float],
        splits: str | Sequence[str] = "train",
        config_name: str | None = None,
        column: str = "text",
        hook: RowHook | None = None,
        streaming: bool = False,
        skip_bad: bool = False,
        advice: str = "",
    ) -> None:
        super().__init__(column, hook, skip_bad, advice)
        if isinstance(names, str):
            names = [names]
        self.fractions = names if isinstance(names, dict) else dict.fromkeys(names, 1.0)
        for name, fraction in self.fractions.items():
            if not 0 < fraction <= 1:
                raise InputError(f"{KEY}: the fraction of '{name}' must be above 0 and at most 1, found {fraction}")
        self.splits = [splits] if isinstance(splits, str) else list(splits)
        self.config_name, self.streaming = config_name, streaming
        self.name = ", ".join(self.fractions)

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return sum(len(rows) for rows in self._parts)

    def signature(self) -> str | None:
        """Return a key of the commit in the local hub cache, or of the state of a local folder."""
        digest = hashlib.blake2b(f"hub {self._rules()}".encode(), digest_size=16)
        for name in self.fractions:
            folder = Path(name).expanduser()
            known = _folder_state(folder) if folder.is_dir() else cached_revision(name, None, "dataset")
            if known is None:
                return None
            digest.update(f"\n{name} {known}".encode())
        return digest.hexdigest()

    def content_hash(self) -> str:
        """Return a hash of the fingerprints that `datasets` gives to the rows."""
        digest = hashlib.blake2b(self._rules().encode(), digest_size=16)
        for rows in self._parts:
            digest.update(f"\n{rows._fingerprint}".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[DocumentChunk]:
        """Yield the text column of every row, or the result of `hook`; `done` counts rows."""
        done = 0
        self.count_anew()
        for rows in self._parts:
            for row, text in self._texts_of(rows):
                whole = DocumentChunk(text, done + row)
                yield from split_long_chunk(whole, LONGEST_CHUNK) if self.hook is None else [whole]
            done += len(rows)

    def byte_ranges(self, size: int) -> Iterator[ByteRange]:
        """Yield consecutive ranges of rows of about `size` bytes."""
        for part, rows in enumerate(self._parts):
            if not len(rows):
                continue
            each = max(rows.data.nbytes // len(rows), 1)
            step = max(size // each, 1)
            for start in range(0, len(rows), step):
                stop = min(start + step, len(rows))
                yield ByteRange(part, start, stop, (stop - start) * each)

    def read(self, byte_range: ByteRange) -> Iterator[DocumentChunk]:
        """Yield the documents of a range of rows."""
        stop = byte_range.stop or 0
        for row, text in self._texts_of(self._parts[byte_range.part].select(range(byte_range.start, stop))):
            yield DocumentChunk(text, byte_range.size * row // (stop - byte_range.start))

    # ---- by shards, for a stream ----

    @property
    def parts(self) -> int:
        """The number of shards."""
        return len(self._shards)

    def chunks_from(self, part: int, place: int) -> Iterator[DocumentChunk]:
        """Yield a shard's rows from row `place` on. Raises InputError if unreadable, or without text in the column."""
        rows = self._shards[part]
        if hasattr(rows, "select"):
            for number, text in self._texts_of(rows.select(range(place, len(rows)))):
                yield DocumentChunk(text, place + number)
            return
        with _explained(self.name):
            for number, row in enumerate(rows.skip(place), start=place + 1):
                where = f"dataset.text_column_name: dataset {self.name}, shard {part}, row {number}"
                with self.no_text_is_bad(where):
                    for text in texts_of_row(row, self.column, self.hook, self.name):
                        yield DocumentChunk(text, number)

    def fingerprint(self, times: bool) -> str:
        """Return a key of every dataset's name and fraction, and its commit or the files of its folder."""
        digest = hashlib.blake2b(f"{self.splits} {self.config_name} {self.column}".encode(), digest_size=16)
        for name, fraction in self.fractions.items():
            folder = Path(name).expanduser()
            known: object = cached_revision(name, None, "dataset")
            if folder.is_dir():
                known = [
                    (path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns if times else 0)
                    for path, stat in _files_of(folder)
                ]
            digest.update(f"\n{folder.name} {fraction} {known}".encode())
        return f"{self.parts} {digest.hexdigest()}"

    @cached_property
    def _shards(self) -> list[Any]:
        """Return the rows in as many shards as there are files."""
        found = []
        for rows in self._parts:
            if hasattr(rows, "select"):
                count = max(len(rows.cache_files), 1)
                found += [rows.shard(count, index, contiguous=True) for index in range(count)]
            else:
                found += [rows.shard(rows.num_shards, index) for index in range(rows.num_shards)]
        return found

    def _texts_of(self, rows: Any) -> Iterator[tuple[int, str]]:
        """Yield (number of rows read, document) of `rows`."""
        if self.hook is None:
            if self.column not in rows.column_names:
                row = dict.fromkeys(rows.column_names)
                raise InputError(f"dataset.text_column_name: dataset {self.name}: {missing_column(self.column, row)}")
            batches = rows.select_columns([self.column]).iter(rows_at_once(rows.data.nbytes, len(rows)))
            rows = ({self.column: text} for batch in batches for text in batch[self.column])
        for number, row in enumerate(rows, start=1):
            with self.no_text_is_bad(f"dataset.text_column_name: dataset {self.name}, row {number}"):
                yield from ((number, text) for text in texts_of_row(row, self.column, self.hook, self.name))

    @cached_property
    def _parts(self) -> list[Any]:
        parts = []
        for name, fraction in self.fractions.items():
            for split in self.splits:
                rows = load_rows(name, self.config_name, split, self.streaming)
                if hasattr(rows, "select"):
                    rows = rows.select(range(int(fraction * len(rows))))
                elif fraction != 1:
                    raise InputError(
                        f"{KEY}: a fraction of '{name}' ({fraction}) is not known before all "
                        "of it is read; expected 1 with dataset.streaming"
                    )
                parts.append(rows)
        return parts

    def _rules(self) -> str:
        return f"{self.fractions} {self.splits} {self.config_name} {self.column} {LONGEST_CHUNK}"


def load_rows(name: str, config_name: str | None, split: str, streaming: bool = False) -> Any:
    """Load a split as a `datasets.Dataset` from a folder of `save_to_disk` or of data files, or a hub repository.

    If the hub is unreachable, the local caches are used. With `streaming`, rows that are not on this machine already
    are a `datasets.IterableDataset`. Raises InputError if the dataset, configuration or split does not exist, or the
    hub is unreachable and nothing is cached.
    """
    configure_hub()
    import datasets

    folder = Path(name).expanduser()
    if name.startswith("~"):
        name = str(folder)
    with _quiet(datasets), _explained(name, datasets.exceptions.DatasetsError):
        if any((folder / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            splits = saved if isinstance(saved, dict) else {str(saved.split or split): saved}
            if split not in splits:
                raise InputError(
                    f"dataset.hf_dataset_splits: '{name}' has no split '{split}'; it has {', '.join(splits)}"
                )
            if config_name is not None and splits[split].info.config_name != config_name:
                raise InputError(
                    f"dataset.hf_dataset_config_name: '{name}' was saved from the configuration "
                    f"{splits[split].info.config_name!r}, not '{config_name}'"
                )
            return splits[split]
        if name.startswith(("/", ".", "~")) and not folder.is_dir():
            raise InputError(f"{KEY}: no such folder: {name}")
        asks_hub = not folder.exists() and not _in_caches(datasets, name) and offline_variable() is None
        if asks_hub and (refusal := without_hub(name, KEY)):
            raise refusal
        limit_waits()
        try:
            return datasets.load_dataset(name, config_name, split=split, streaming=streaming)
        except OSError:
            snapshot = _cached_snapshot(name)
            if snapshot is None:
                raise
            return datasets.load_dataset(snapshot, config_name, split=split, streaming=streaming)


def limit_waits() -> None:
    """Make the hub's requests fail, and be retried, if nothing arrives for `SILENCE_S` seconds.

    By default `huggingface_hub` waits forever.
    """
    import huggingface_hub

    huggingface_hub.get_session().timeout = SILENCE_S


def _in_caches(datasets: Any, name: str) -> bool:
    """Return whether the hub's cache or the cache of `datasets` has any file of a repository."""
    prepared = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    return prepared.exists() or cached_revision(name, None, "dataset") is not None


def _cached_snapshot(name: str) -> str | None:
    """Return the folder of a repository in the local hub cache, or None if it is incomplete."""
    import huggingface_hub as hub

    if Path(name).exists():
        return None
    try:
        return hub.snapshot_download(name, repo_type="dataset", local_files_only=True)
    except (OSError, hub.errors.EntryNotFoundError, hub.errors.HFValidationError):
        return None


def _files_of(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """Return every file of a folder."""
    return [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]


def _folder_state(folder: Path) -> str | None:
    """Return a key that changes with any file of the folder; None if one changed too recently to tell."""
    digest = hashlib.blake2b(digest_size=16)
    for file, stat in _files_of(folder):
        if stat.st_mtime > time.time() - YOUNG:
            return None
        digest.update(f"\n{file.relative_to(folder)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return f"{folder.absolute()} {digest.hexdigest()}"


@contextmanager
def _explained(name: str, *library_errors: type[Exception]) -> Iterator[None]:
    """Turn all errors of loading into an InputError of one line."""
    failures: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, *library_errors)
    try:
        yield
    except failures as error:
        if isinstance(error, OSError) and not Path(name).exists() and (refusal := without_hub(name, KEY)):
            raise refusal from None
        raise InputError(f"{KEY}: cannot load '{name}': {first_line(error)}") from None


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Hide the library's warnings, and its progress bars unless on a terminal."""
    verbosity = datasets.logging.get_verbosity()
    bars = datasets.is_progress_bar_enabled()
    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
