"""Read documents from files: text, jsonl, compressed or not, parquet, arrow, folders, and Python's own library.

A document is:

    .jsonl .json .ndjson .jsonlines    the text column of a line
    .parquet .arrow                    the text column of a row
    any other file (.gz .zst)          the file; a long one is cut into chunks of about 64 KiB, at blank lines or else
                                       line ends, to bound memory, and so that part of a book can be held out

A line or row of more than half a million characters is cut into chunks, too.
"""

import hashlib
import io
import json
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import xxhash

from kenotron.config.errors import InputError, counted, no_such_path, os_errors
from kenotron.storage.paths import AnyPath, RemoteStat, as_path, walk
from kenotron.text import compression
from kenotron.text.compression import DAMAGE, decompressed
from kenotron.text.documents import (
    LONGEST_CHUNK,
    YOUNG,
    ByteRange,
    DocumentChunk,
    MayBeBad,
    RowHook,
    cut,
    split_long_chunk,
)
from kenotron.text.json_lines import json_documents
from kenotron.text.tables import ROW_READERS, RowReader

CHUNK_CHARACTERS = 64 * 1024
"""Characters after which a text file is cut at the next blank line or line end."""

ROW = 1 << 24
"""An upper bound of the chunks of a row."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonlines")
TABLES = (".csv", ".tsv", ".xlsx")
FOREIGN_SUFFIXES = (".xz", ".bz2", ".zip", ".tar", ".tgz")
FIRST_BYTES = {b"\x1f\x8b": ".gz", b"(\xb5/\xfd": ".zst", b"PAR1\x15": ".parquet", b"ARROW1\0\0": ".arrow"}
"""First bytes of files that are not plain text → the suffix that they should have."""
TEXT_SUFFIXES = (".txt", ".md", ".text", *JSON_SUFFIXES)


class FileDocuments(MayBeBad):
    """Documents of text, jsonl, parquet and arrow files.

    `chunk` is the length from which a text file is cut (None: never). With `skip_bad`, invalid lines, and the rest of a
    file from where it is not UTF-8 or damaged, are left out and counted; otherwise they are errors. `hook` returns the
    documents of a row, instead of its `column`. `advice`, the end of errors, says how to leave out bad documents.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[AnyPath],
        column: str = "text",
        chunk: int | None = CHUNK_CHARACTERS,
        skip_bad: bool = False,
        hook: RowHook | None = None,
        advice: str = "",
    ) -> None:
        super().__init__(column, hook, skip_bad, advice)
        self.name, self.files, self.chunk = name, list(files), chunk
        self._sizes = {file: _stat(file).st_size for file in self.files}
        self.size = sum(self._sizes.values())
        for file in self.files:
            if hook is not None and not has_rows(file):
                raise InputError(
                    f"{file}: a text file has no rows (--filter, --repeat, sft_dataloader); expected jsonl or parquet"
                )

    def signature(self) -> str | None:
        """Return a key of path, size and time of every file; None if one changed too recently for its time to tell."""
        digest = hashlib.blake2b(self._rules(), digest_size=16)
        for file in self.files:
            stat = _stat(file)
            if not isinstance(stat, RemoteStat) and stat.st_mtime > time.time() - YOUNG:
                return None
            digest.update(f"\n{file.absolute()} {stat.st_size} {_version(stat)}".encode())
        return digest.hexdigest()

    def content_hash(self) -> str:
        """Return a hash of the bytes of every file."""
        digest = xxhash.xxh3_128(self._rules())
        for file in self.files:
            digest.update(f"\n{is_json(file)} {_stat(file).st_size}\n".encode())
            with _readable(file), file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()

    def documents(self) -> Iterator[DocumentChunk]:
        """Yield every document, file after file; `done` counts bytes."""
        done = 0
        self.count_anew()
        for part, file in enumerate(self.files):
            for whole in self.read(ByteRange(part, 0, None, self._sizes[file])):
                uncut = self.chunk is None or self.hook is not None  # a hook's documents may be JSON (text/sft.py)
                for chunk in [whole] if uncut else split_long_chunk(whole, LONGEST_CHUNK):
                    yield chunk._replace(done=done + chunk.done)
            done += self._sizes[file]

    def byte_ranges(self, size: int) -> Iterator[ByteRange]:
        """Yield ranges: JSON lines are cut near multiples of `size` bytes, tables between row groups, others never."""
        for part, file in enumerate(self.files):
            whole = self._sizes[file]
            if whole > size and _suffix(file) in JSON_SUFFIXES:
                for start in range(0, whole, size):
                    yield ByteRange(part, start, min(start + size, whole), min(size, whole - start))
            elif whole > size and (rows := ROW_READERS.get(_suffix(file))) is not None:
                for start, stop, part_size in rows.ranges(file, whole, size):
                    yield ByteRange(part, start, stop, part_size)
            else:
                yield ByteRange(part, 0, None, whole)

    def read(self, byte_range: ByteRange) -> Iterator[DocumentChunk]:
        """Yield the documents of a range. Raises InputError if the file is unreadable or damaged."""
        file = self.files[byte_range.part]
        if (rows := ROW_READERS.get(_suffix(file))) is not None:
            for found in rows.read(file, byte_range.start, byte_range.stop, self):
                yield DocumentChunk(found.text, int(found.share * byte_range.size))
            return
        with _readable(file), file.open("rb") as raw:
            if not byte_range.start:
                _refuse_other_form(raw, file)
            stream = decompressed(raw, _suffix(file))
            for text, last in (self._rows if is_json(file) else self._chunks)(stream, raw, file, byte_range):
                yield DocumentChunk(text, min(raw.tell() - byte_range.start, byte_range.size), last)

    # ---- by files, for a stream ----

    @property
    def parts(self) -> int:
        """The number of files."""
        return len(self.files)

    def chunks_from(self, part: int, place: int) -> Iterator[DocumentChunk]:
        """Yield the chunks of a file from `place` on, which is the `done` of the previous chunk: a byte offset in an
        unpacked jsonl file, a row and chunk of a table, or else the index of a chunk.

        Raises InputError as reading does, and if the file's size has changed since it was first opened.
        """
        file, size = self.files[part], self._sizes[self.files[part]]
        if (found := _stat(file).st_size) != size:
            raise InputError(f"{file}: changed while the run was reading it (it had {size:,} bytes, now {found:,})")
        if _suffix(file) in JSON_SUFFIXES:
            for chunk in self.read(ByteRange(part, place, None, size)):
                yield chunk._replace(done=place + chunk.done)
        elif (rows := ROW_READERS.get(_suffix(file))) is not None:
            yield from self._rows_from(rows, file, place)
        else:
            for number, chunk in enumerate(
                islice(self.read(ByteRange(part, 0, None, size)), place, None), start=place + 1
            ):
                yield chunk._replace(done=number)

    def _rows_from(self, rows: RowReader, file: AnyPath, place: int) -> Iterator[DocumentChunk]:
        """Yield the chunks of a table from `place` on: row * `ROW` + the number of the row's chunks already read."""
        first = rows.start_of(file, place // ROW) if place else 0
        done = 0
        for found in rows.read(file, first, None, self):
            whole = DocumentChunk(found.text, 0)
            for chunk in split_long_chunk(whole, LONGEST_CHUNK) if self.hook is None else [whole]:
                done = max(done, found.row * ROW) + 1
                if done > place:
                    yield chunk._replace(done=done)

    def fingerprint(self, times: bool) -> str:
        """Return a key of name and size of every file, with `times` also of their last changes."""
        digest = hashlib.blake2b(self._rules(), digest_size=16)
        for file in self.files:
            changed = _version(_stat(file)) if times else 0
            digest.update(f"\n{file.name} {self._sizes[file]} {changed}".encode())
        return digest.hexdigest()

    def _rows(
        self, stream: IO[bytes], raw: IO[bytes], file: AnyPath, byte_range: ByteRange
    ) -> Iterator[tuple[str, bool]]:
        with self._damage_reported(raw, file):
            for text in json_documents(stream, file, byte_range.start, byte_range.stop, self):
                yield text, True

    def _chunks(self, stream: IO[bytes], raw: IO[bytes], file: AnyPath, _: ByteRange) -> Iterator[tuple[str, bool]]:
        """Yield the chunks of a text file, each with whether it is the last."""
        waiting: str | None = None
        reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")  # closing it closes `stream`
        with self._damage_reported(raw, file):
            try:
                whole = iter(reader.read, "")
                for text in (
                    whole if self.chunk is None else cut(iter(partial(reader.readline, self.chunk), ""), self.chunk)
                ):
                    if waiting is None:
                        self._refuse_other_content(text, file)
                    else:
                        yield waiting, False
                    waiting = text
            except UnicodeDecodeError as error:
                found, place = error.object[error.start], stream.tell() - len(error.object) + error.start
                self.bad(f"{file}: not UTF-8 (byte 0x{found:02x} at {place:,}: {error.reason}); convert it first")
        if waiting is not None:
            yield waiting, True

    def _refuse_other_content(self, text: str, file: AnyPath) -> None:
        """Raise InputError if a file starts like JSON, an archive, or UTF-16 instead of text."""
        begin = text[:512]
        if begin.count("\0") > len(begin) // 4:
            raise InputError(f"{file}: is no plain text: it begins with many NUL characters (an archive, or UTF-16?)")
        if re.match(r'\s*\[\s*\{\s*"', begin):
            raise InputError(f"{file}: holds one JSON array; `jq -c '.[]' {file.name}` writes it as lines, for .jsonl")
        rows: list[dict[str, object]] = []
        rest = text.lstrip("\ufeff \n")
        with suppress(ValueError, RecursionError):
            while len(rows) < 2 and rest.startswith("{"):
                row, end = json.JSONDecoder().raw_decode(rest)
                rows.append(row)
                rest = rest[end:].lstrip()
        if len(rows) == 2 or any(self.column in row for row in rows):
            raise InputError(
                f"{file}: holds JSON objects, but is read as one text by its name; let it end with .jsonl, with one a "
                f"line (`jq -c .` writes them so)"
            )

    @contextmanager
    def _damage_reported(self, raw: IO[bytes], file: AnyPath) -> Iterator[None]:
        """Report damage with the number of compressed bytes read so far, at most 128 KiB after the damage."""
        try:
            yield
        except DAMAGE as error:
            form = "zstd" if _suffix(file) == ".zst" else "gzip"
            self.bad(f"{file}: damaged {form} file, near byte {raw.tell():,}: {error}")

    def _rules(self) -> bytes:
        return f"files {self.column} {self.chunk} {LONGEST_CHUNK} {self.chunk is None}".encode()


def find_files(path: str | AnyPath, key: str) -> list[AnyPath]:
    """Return the files under `path` in a fixed order: itself, or a folder's files with a text suffix.

    For a folder without such files, return all its files. Links are followed; hidden files and folders are left out.
    """
    root = as_path(path)
    if root.is_file():
        if _suffix(root) in FOREIGN_SUFFIXES:
            raise InputError(
                f"{key}: expected text, jsonl, .gz or .zst of them, parquet or arrow, found {path}; unpack it first"
            )
        if _suffix(root) in TABLES:
            raise InputError(f"{key}: {path} is a table in another format; write its rows as jsonl or parquet first")
        return [root]
    if not root.is_dir():
        raise no_such_path(key, path)
    below = [file for file in sorted(walk(root), key=str) if not file.name.startswith(".")]
    found = [file for file in below if _suffix(file) not in FOREIGN_SUFFIXES]
    for file in below:
        if _suffix(file) in FOREIGN_SUFFIXES and file.stem.lower().endswith((*TEXT_SUFFIXES, *ROW_READERS)):
            raise InputError(f"{key}: {file} is compressed in a format that is not supported; unpack it first")
    if not found:
        raise InputError(f"{key}: folder {path} holds no text file")
    return [file for file in found if _unpacked_name(file).endswith((*TEXT_SUFFIXES, *ROW_READERS))] or found


def unread_files(path: str | AnyPath) -> str:
    """Return a line about a folder's files that `find_files` skips, by suffix; empty if there are none."""
    root = as_path(path)
    if not root.is_dir():
        return ""
    read = set(find_files(root, str(path)))
    rest = [file for file in walk(root) if not file.name.startswith(".") and file not in read]
    kinds = Counter(_suffix(file) or "without a suffix" for file in rest)
    most = sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0]))[:5]
    listed = ", ".join(f"{count:,} {suffix}" for suffix, count in most)
    return f"{path}: {counted(len(rest), 'file')} in it not read ({listed})" if rest else ""


def python_stdlib() -> FileDocuments:
    """Return the embedded corpus, the sources of Python's own standard library, with one document per file.

    Its tests are left out, because many systems do not install them, and they are repetitive.
    """
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in outside]
        # _sysconfigdata*.py differs from machine to machine
        sources = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [Path(folder, name).relative_to(root) for name in sources]
    files: list[AnyPath] = [root / file for file in sorted(found, key=Path.as_posix)]
    if not files:
        raise InputError(f"dataset.corpus: this Python has no library sources under {root}")
    return FileDocuments("python-stdlib", files, chunk=None, skip_bad=True)


def has_rows(file: AnyPath) -> bool:
    """Return whether a file has rows with columns, not one text."""
    return is_json(file) or _suffix(file) in ROW_READERS


def is_json(file: AnyPath) -> bool:
    """Return whether a file has lines of JSON."""
    return _unpacked_name(file).endswith(JSON_SUFFIXES)


def _unpacked_name(file: AnyPath) -> str:
    name = file.name.lower()
    return name.removesuffix(_suffix(file)) if _suffix(file) in compression.SUFFIXES else name


def _suffix(file: AnyPath) -> str:
    return file.suffix.lower()


def _refuse_other_form(raw: IO[bytes], file: AnyPath) -> None:
    """Raise InputError for unsupported tables and archives, and for a file whose first bytes contradict its suffix."""
    if _unpacked_name(file).endswith((*TABLES, *FOREIGN_SUFFIXES)):
        raise InputError(f"{file}: a table or an archive is no text; write its rows as jsonl or parquet first")
    begin = raw.read(8)
    raw.seek(0)
    for first, suffix in FIRST_BYTES.items():
        if begin.startswith(first) and suffix != _suffix(file):
            raise InputError(f"{file}: begins as a {suffix} file does; let its name end with {suffix}")


def _stat(file: AnyPath) -> os.stat_result | RemoteStat:
    with _readable(file):
        return file.stat()


def state_of(file: AnyPath) -> str:
    """Return path, size and version of a file as one key."""
    stat = _stat(file)
    return f"{file.absolute()} {stat.st_size} {_version(stat)}"


def _version(stat: os.stat_result | RemoteStat) -> str | int:
    """Return a value that changes with the content; for local files the time of the last change."""
    return stat.version if isinstance(stat, RemoteStat) else stat.st_mtime_ns


def _readable(path: AnyPath) -> AbstractContextManager[None]:
    """Turn errors of reading `path` into an InputError of one line that names it."""
    return os_errors(f"{path}: cannot read")
