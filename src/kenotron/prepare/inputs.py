"""What `kenotron data tokenize` reads: its arguments as texts, cut into shards.

A shard is a run of byte ranges (text/documents.py) of about `--shard-size`, planned from names and sizes alone:

    a.jsonl (600 MB)    |-----0-----|-----1-----|--2
    b.jsonl (100 MB)                               --2--|
    c.jsonl.gz (900 MB)                                 |-------3-------|    never cut

So shard 3 can be made without reading what comes before it, by any process, at any time.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError, no_such_path
from kenotron.config.remote_data import is_remote
from kenotron.data.manifest import Json
from kenotron.text.byte_level_bpe import first_characters
from kenotron.text.documents import LONGEST_CHUNK, ByteRange, RowHook, StreamableDocuments, texts_of_row
from kenotron.text.file_documents import FileDocuments, find_files, has_rows, state_of
from kenotron.text.hub_datasets import HubDocuments


class InputShard(NamedTuple):
    """What one output file is made of: byte_ranges, each with the number of its texts; `size` in bytes."""

    number: int
    byte_ranges: list[tuple[int, ByteRange]]
    size: int


def open_input(
    name: str,
    column: str = "text",
    split: str = "train",
    config_name: str | None = None,
    skip_bad: bool = False,
    hook: RowHook | None = None,
) -> StreamableDocuments:
    """Open the texts of a file, a folder of files, a folder that `datasets` saved, or a dataset of the hub.

    Raises InputError: nothing of that name; a column of files without rows; split or config name of files.
    """
    path = Path(name).expanduser()
    advice = "; --on-bad-document skip leaves it out"
    saved = not is_remote(name) and any((path / mark).is_file() for mark in ("state.json", "dataset_dict.json"))
    if is_remote(name) or (path.exists() and not saved):
        files = find_files(name, "INPUT")
        for option, given in (("--split", split != "train"), ("--config-name", config_name is not None)):
            if given:
                raise InputError(f"{option}: {name} is neither a dataset of the hub nor a folder saved by `datasets`")
        if column != "text" and not any(map(has_rows, files)):
            raise InputError(f"--column: {name}: text files have no columns; expected jsonl, parquet or arrow")
        shown = name.rstrip("/") if is_remote(name) else str(Path(name))
        return FileDocuments(shown, files, column, LONGEST_CHUNK, skip_bad, hook, advice)
    if not saved and (
        path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1 or path.suffix
    ):
        raise no_such_path("INPUT", name)
    return HubDocuments(name, split, config_name, column, hook, skip_bad=skip_bad, advice=advice)


def plan_shards(texts: Sequence[StreamableDocuments], size: int) -> list[InputShard]:
    """Return all documents of `texts` in order, in shards of at most `size` bytes where their form allows."""
    shards: list[InputShard] = []
    for number, source in enumerate(texts):
        for byte_range in source.byte_ranges(size):
            if shards and shards[-1].size + byte_range.size <= size:
                last = shards[-1]
                shards[-1] = last._replace(size=last.size + byte_range.size)
                last.byte_ranges.append((number, byte_range))
            else:
                shards.append(InputShard(len(shards), [(number, byte_range)], byte_range.size))
    return shards


def describe_inputs(texts: Sequence[StreamableDocuments]) -> dict[str, Json]:
    """Return each input's size by its name, and a digest that is another one once its files are others."""
    return {source.name: {"size": source.size, "state": _state(source)} for source in texts}


def _state(texts: StreamableDocuments) -> str:
    if not isinstance(texts, FileDocuments):
        return texts.content_hash()
    digest = hashlib.blake2b(digest_size=16)
    for file in texts.files:
        digest.update(f"{state_of(file)}\n".encode())
    return digest.hexdigest()


# ---- functions of the user ---------------------------------------------------------------------------------


def row_hook(column: str, keep: str | None, repeat: str | None) -> RowHook | None:
    """Return what `--filter keep` and `--repeat repeat` make of a row; None without both.

    keep(row) -> bool | str | list[str]     False: no document; True: the column; text: the documents themselves
    repeat(row, file) -> int                how often each of them is written, one after the other
    """
    if keep is None and repeat is None:
        return None
    kept = import_dotted(keep, "--filter") if keep else lambda row: True
    times = import_dotted(repeat, "--repeat") if repeat else lambda row, file: 1

    def hook(row: Json, file: str) -> list[str]:
        answer = kept(row)
        texts = _documents(answer, row, column, file, keep)
        if not texts:
            return []
        count = times(row, file)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InputError(f"--repeat: {repeat} must return a number of times, found {count!r} for a row of {file}")
        return [text for text in texts for _ in range(count)]

    return hook


def _documents(answer: Any, row: Json, column: str, file: str, keep: str | None) -> list[str]:
    if answer is None or answer is False:
        return []
    if answer is True:
        return texts_of_row(row, column, None, file)
    texts = [answer] if isinstance(answer, str) else answer
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"--filter: {keep} must return a bool, text or a list of texts, found {answer!r:.60}")
    return texts


def describe_hook(path: str | None, key: str) -> str | None:
    """Return the dotted path with a hash of its module: another function is another option."""
    if path is None:
        return None
    function: Callable = import_dotted(path, key)
    try:
        source = inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):  # not written in Python
        return path
    return f"{path} (xxh3 {xxhash.xxh3_64_hexdigest(source.encode())})"


def first_texts(texts: Sequence[StreamableDocuments], characters: int) -> Iterator[str]:
    """Yield documents from the beginning of each of `texts`, `characters` in all, as many of each."""
    for source in texts:
        yield from first_characters((chunk.text for chunk in source.documents()), characters // len(texts))
