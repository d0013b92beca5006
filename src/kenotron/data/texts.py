"""Documents of files: text, jsonl, gzipped or not, folders of them, and Python's own library.

What a document is:

    .jsonl .json .ndjson (.gz)    the text column of a line
    any other file (.gz)          the file; a long one comes in pieces of about 64 KiB, cut at blank lines, else line
                                  ends: memory stays bounded, part of a book can be held out

Every set of texts answers the same few questions: what it is (`name`), whether it changed (`signature`, cheap, and
`content_hash`, by reading), how much there is (`size`), and the documents in an order that never varies.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import xxhash

from kenotron.config.errors import InputError, nearest

PIECE = 64 * 1024
"""Characters after which a text file is cut at the next good place."""

YOUNG = 2.0
"""Seconds within which a second change of a file may leave its time unchanged, so that the time proves nothing."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
FOREIGN_SUFFIXES = (".parquet", ".arrow", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz")
TEXT_SUFFIXES = (".txt", ".md", ".text", *JSON_SUFFIXES)


class Piece(NamedTuple):
    """A document or a piece of one: its text, the work done once it is read, and whether it is the document's last."""

    text: str
    done: int
    last: bool = True


class Texts(Protocol):
    """A finite sequence of documents."""

    name: str
    skipped: int
    """Files left out by the last pass over `documents`."""

    @property
    def size(self) -> int:
        """All the work, in the unit that `Piece.done` counts: bytes or rows."""
        ...

    def signature(self) -> str | None:
        """Cheap to get, and another one when the content may be another; None when nothing cheap is known."""
        ...

    def content_hash(self) -> str:
        """Names the content; equal for equal documents."""
        ...

    def documents(self) -> Iterator[Piece]:
        """Every document, in pieces where it is long."""
        ...


class FileTexts:
    """Documents of text and jsonl files.

    `piece` is the length from which a text file is cut (None: never). With `skip_undecodable`, a file is left out from
    where it is no UTF-8, and counted (for files that the user did not choose); otherwise that is an error.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        column: str = "text",
        piece: int | None = PIECE,
        skip_undecodable: bool = False,
    ) -> None:
        self.name, self.files, self.column = name, list(files), column
        self.piece, self.skip_undecodable, self.skipped = piece, skip_undecodable, 0
        self._sizes = {file: _stat(file).st_size for file in self.files}
        self.size = sum(self._sizes.values())

    def signature(self) -> str | None:
        digest = hashlib.blake2b(self._rules(), digest_size=16)
        for file in self.files:
            stat = _stat(file)
            if stat.st_mtime > time.time() - YOUNG:
                return None
            digest.update(f"\n{file.absolute()} {stat.st_size} {stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def content_hash(self) -> str:
        digest = xxhash.xxh3_128(self._rules())
        for file in self.files:
            digest.update(f"\n{_is_json(file)} {_stat(file).st_size}\n".encode())
            with _readable(file), open(file, "rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()

    def documents(self) -> Iterator[Piece]:
        done = self.skipped = 0
        for file in self.files:
            with _readable(file), open(file, "rb") as raw:
                stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if file.suffix == ".gz" else raw  # type: ignore
                for text, last in self._rows(stream, file) if _is_json(file) else self._pieces(stream, file):
                    yield Piece(text, done + min(raw.tell(), self._sizes[file]), last)
            done += self._sizes[file]

    def _rows(self, stream: IO[bytes], file: Path) -> Iterator[tuple[str, bool]]:
        return ((text, True) for text in json_documents(stream, self.column, file))

    def _pieces(self, stream: IO[bytes], file: Path) -> Iterator[tuple[str, bool]]:
        """The pieces of a text file, each with whether it is the last."""
        waiting: str | None = None
        reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")  # closes `stream` with its own end
        try:
            for text in cut(reader, self.piece):
                if waiting is not None:
                    yield waiting, False
                waiting = text
        except UnicodeDecodeError as error:
            if not self.skip_undecodable:
                found = error.object[error.start]
                raise InputError(f"{file}: not UTF-8 (byte 0x{found:02x}: {error.reason}); convert it first") from None
            self.skipped += 1
        if waiting is not None:
            yield waiting, True

    def _rules(self) -> bytes:
        return f"files {self.column} {self.piece} {self.skip_undecodable}".encode()


def cut(stream: io.TextIOWrapper, piece: int | None) -> Iterator[str]:
    """Cut a text after `piece` characters at a blank line, after twice as many at any line end, and never inside a
    line shorter than `piece`. Empty pieces are left out."""
    if piece is None:
        if text := stream.read():
            yield text
        return
    lines: list[str] = []
    length = 0
    while line := stream.readline(piece):
        lines.append(line)
        length += len(line)
        if length >= 2 * piece or (length >= piece and line.isspace()):
            yield "".join(lines)
            lines, length = [], 0
    if lines:
        yield "".join(lines)


def json_documents(stream: IO[bytes], column: str, file: Path) -> Iterator[str]:
    """The text column of every line of a jsonl stream. Blank lines are left out."""
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError as error:
            raise InputError(f"{file}:{number}: not UTF-8 (byte {error.start} of the line: {error.reason})") from None
        except ValueError as error:
            raise InputError(f"{file}:{number}: expected one JSON object a line, found: {error}") from None
        text = row.get(column) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise InputError(f"{file}:{number}: {missing_column(column, row)}")
        # JSON may escape half a surrogate pair, which no UTF-8 holds; it becomes a question mark.
        yield text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def missing_column(column: str, row: object) -> str:
    """What to say of a row whose text column is not a string."""
    if not isinstance(row, dict):
        return f"expected a JSON object with a text column '{column}', found {type(row).__name__}"
    if column in row:
        return f"column '{column}' must hold text, found {type(row[column]).__name__}"
    return f"no text column '{column}'; found {', '.join(sorted(row)) or 'nothing'}{nearest(column, row)}"


def find_files(path: str | Path, key: str) -> list[Path]:
    """The files under `path` in an order that never varies: itself, or those of a folder with a text suffix.

    A folder without any such file gives all its files. Hidden files and folders are left out.
    """
    root = Path(path).expanduser()
    if root.is_file():
        if root.suffix in FOREIGN_SUFFIXES:
            raise InputError(
                f"{key}: expected text, jsonl or jsonl.gz, found {path}"
                + ("; read it by hf_dataset_or_datasets" if root.suffix in (".parquet", ".arrow") else "")
            )
        return [root]
    if not root.is_dir():
        raise InputError(f"{key}: no such file or folder: {path}")
    with _readable(root):
        os.listdir(root)
    relative = [
        Path(folder, name).relative_to(root)
        for folder, names in _walk(root, lambda name: name.startswith("."))
        for name in names
        if not name.startswith(".")
    ]
    found = sorted(relative, key=Path.as_posix)
    found = [file for file in found if file.suffix not in FOREIGN_SUFFIXES]
    if not found:
        raise InputError(f"{key}: folder {path} holds no text file")
    texts = [file for file in found if file.name.removesuffix(".gz").endswith(TEXT_SUFFIXES)]
    return [root / file for file in texts or found]


def python_stdlib() -> FileTexts:
    """The embedded corpus: the sources of Python's own standard library, one document a file.

    Its tests are left out: many systems do not install them, and they say the same thing over and over.
    """
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    found = [
        Path(folder, name).relative_to(root)
        for folder, names in _walk(root, outside.__contains__)
        for name in names
        # _sysconfigdata*.py is written by the build of this one machine
        if name.endswith(".py") and not name.startswith("_sysconfigdata")
    ]
    files = [root / file for file in sorted(found, key=Path.as_posix)]
    if not files:
        raise InputError(f"dataset.corpus: this Python has no library sources under {root}")
    return FileTexts("python-stdlib", files, piece=None, skip_undecodable=True)


def _walk(root: Path, is_outside: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_outside(name)]
        yield folder, names


def _is_json(file: Path) -> bool:
    return file.name.removesuffix(".gz").endswith(JSON_SUFFIXES)


def _stat(file: Path) -> os.stat_result:
    with _readable(file):
        return file.stat()


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns every way in which reading `path` fails into one line that names it."""
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path}: damaged gzip file: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from None
