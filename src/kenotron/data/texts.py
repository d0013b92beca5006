"""Documents of files: text, jsonl, packed or not, parquet, arrow, folders of them, and Python's own library.

What a document is:

    .jsonl .json .ndjson (.gz .zst)    the text column of a line
    .parquet .arrow                    the text column of a row
    any other file (.gz .zst)          the file; a long one comes in pieces of about 64 KiB, cut at blank lines, else
                                       line ends: memory stays bounded, part of a book can be held out

A line or row of more than half a million characters comes in pieces, too.

Every set of texts answers the same few questions: what it is (`name`), whether it changed (`signature`, cheap, and
`content_hash`, by reading), how much there is (`size`), and the documents in an order that never varies. They are also
read span by span, each of which can be found without reading those before it:

    a.jsonl   |--------|--------|----|      cut at line ends near multiples of the size asked for
    b.jsonl.gz, b.jsonl.zst, c.txt          one span each
    d.parquet |------------|---------|      cut between row groups
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import xxhash

from kenotron.config.errors import InputError, nearest, no_such_path

from .remote import AnyPath, RemotePath, RemoteStat, as_path

PIECE = 64 * 1024
"""Characters after which a text file is cut at the next good place."""

LONGEST_PIECE = 1 << 19
"""Characters of a document that are encoded at once: an encoding takes some hundred bytes for each."""

YOUNG = 2.0
"""Seconds within which a second change of a file may leave its time unchanged, so that the time proves nothing."""

LONGEST_LINE = 32 << 20
"""Bytes of a JSON line; it is parsed as a whole, in several times its memory."""

ROW = 1 << 24
"""More pieces than a row has."""

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")
PACKED_SUFFIXES = (".gz", ".zst")
FOREIGN_SUFFIXES = (".xz", ".bz2", ".zip", ".tar", ".tgz")
TEXT_SUFFIXES = (".txt", ".md", ".text", *JSON_SUFFIXES, *TABLE_SUFFIXES)

LINE_END = re.compile(r"\r\n|\r|\n")

DAMAGE = (gzip.BadGzipFile, zlib.error, EOFError)

RowHook = Callable[[dict[str, Any], str], list[str]]
"""The documents of a row (all its columns) of the file so named."""


class Piece(NamedTuple):
    """A document or a piece of one: its text, the work done once it is read, and whether it is the document's last."""

    text: str
    done: int
    last: bool = True


class Span(NamedTuple):
    """Documents that are read by themselves: of file or dataset number `part`, from `start` to `stop`.

    `start` and `stop` count bytes of a jsonl file, row groups of a parquet file, rows of a dataset; `stop` None: all of
    it. `size`: bytes, of a dataset an estimate.
    """

    part: int
    start: int
    stop: int | None
    size: int


class Texts(Protocol):
    """A finite sequence of documents."""

    name: str
    skipped: int
    """What was left out because it cannot be read (lines, ends of files), since the last call of `documents`."""

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

    def spans(self, size: int) -> Iterator[Span]:
        """All documents, in spans of at most `size` bytes where their form allows to cut them so."""
        ...

    def read(self, span: Span) -> Iterator[Piece]:
        """The documents of a span; `Piece.done` counts its bytes."""
        ...


class StreamTexts(Texts, Protocol):
    """Documents in several parts, each of which can be read from a place in it."""

    @property
    def parts(self) -> int:
        """How many parts (files, shards) a stream reads one after the other."""
        ...

    def pieces_from(self, part: int, place: int) -> Iterator[Piece]:
        """The pieces of a part from `place` on; `Piece.done` is the place after each. A part begins at place 0."""
        ...

    def fingerprint(self, times: bool) -> str:
        """Another one where names or sizes of the parts are others, or (with `times`) when they changed last."""
        ...


class FileTexts:
    """Documents of text, jsonl, parquet and arrow files.

    `piece` is the length from which a text file is cut (None: never). With `skip_bad`, a line that is no such JSON, and
    a file from where it is no UTF-8 or damaged, are left out and counted; otherwise they are errors. `hook` makes the
    documents of a row, instead of its `column`.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[AnyPath],
        column: str = "text",
        piece: int | None = PIECE,
        skip_bad: bool = False,
        hook: RowHook | None = None,
    ) -> None:
        self.name, self.files, self.column = name, list(files), column
        self.piece, self.skip_bad, self.hook, self.skipped = piece, skip_bad, hook, 0
        self._sizes = {file: _stat(file).st_size for file in self.files}
        self.size = sum(self._sizes.values())
        for file in self.files:
            if hook is not None and not has_rows(file):
                raise InputError(
                    f"{file}: a text file has no rows (--filter, --repeat, sft_dataloader); expected jsonl or parquet"
                )

    def signature(self) -> str | None:
        digest = hashlib.blake2b(self._rules(), digest_size=16)
        for file in self.files:
            stat = _stat(file)
            if isinstance(stat, RemoteStat):
                digest.update(f"\n{file} {stat.st_size} {stat.version}".encode())
                continue
            if stat.st_mtime > time.time() - YOUNG:
                return None
            digest.update(f"\n{file.absolute()} {stat.st_size} {stat.st_mtime_ns}".encode())
        return digest.hexdigest()

    def content_hash(self) -> str:
        digest = xxhash.xxh3_128(self._rules())
        for file in self.files:
            digest.update(f"\n{_is_json(file)} {_stat(file).st_size}\n".encode())
            with _readable(file), file.open("rb") as stream:
                while block := stream.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()

    def documents(self) -> Iterator[Piece]:
        done = self.skipped = 0
        for part, file in enumerate(self.files):
            for whole in self.read(Span(part, 0, None, self._sizes[file])):
                for piece in [whole] if self.piece is None else short_pieces(whole, LONGEST_PIECE):
                    yield Piece(piece.text, done + piece.done, piece.last)
            done += self._sizes[file]

    def spans(self, size: int) -> Iterator[Span]:
        for part, file in enumerate(self.files):
            whole = self._sizes[file]
            if whole > size and file.suffix in JSON_SUFFIXES:
                for start in range(0, whole, size):
                    yield Span(part, start, min(start + size, whole), min(size, whole - start))
            elif whole > size and file.suffix == ".parquet":
                from .tables import row_group_spans

                for start, stop, part_size in row_group_spans(file, whole, size):
                    yield Span(part, start, stop, part_size)
            else:
                yield Span(part, 0, None, whole)

    def read(self, span: Span) -> Iterator[Piece]:
        file = self.files[span.part]
        if file.suffix in TABLE_SUFFIXES:
            yield from self._table(span, file)
            return
        with _readable(file), file.open("rb") as raw:
            stream = _unpacked(raw, file.suffix)
            for text, last in (self._rows if _is_json(file) else self._pieces)(stream, raw, file, span):
                yield Piece(text, min(raw.tell() - span.start, span.size), last)

    # ---- part by part, for a stream ----

    @property
    def parts(self) -> int:
        return len(self.files)

    def pieces_from(self, part: int, place: int) -> Iterator[Piece]:
        """The pieces of a file from `place` on, which `Piece.done` of the piece before told: a byte of an unpacked
        jsonl file, a row and its pieces of a table, else the number of a piece.

        Errors (InputError): besides those of reading, the file has another size than when it was opened first.
        """
        file, size = self.files[part], self._sizes[self.files[part]]
        if (found := _stat(file).st_size) != size:
            raise InputError(f"{file}: has changed while the run reads it (it had {size:,} bytes, now {found:,})")
        if file.suffix in JSON_SUFFIXES:
            for piece in self.read(Span(part, place, None, size)):
                yield piece._replace(done=place + piece.done)
        elif file.suffix in TABLE_SUFFIXES:
            yield from self._table_from(file, place)
        else:
            for number, piece in enumerate(islice(self.read(Span(part, 0, None, size)), place, None), start=place + 1):
                yield piece._replace(done=number)

    def _table_from(self, file: AnyPath, place: int) -> Iterator[Piece]:
        """Of a table a place is a row times `ROW`, and how many pieces of the row were read."""
        from .tables import row_group_of, table_documents

        first = row_group_of(file, place // ROW) if file.suffix == ".parquet" and place else 0
        before = 0
        for cell in table_documents(file, self.column, first, None, self.hook, self._bad, LONGEST_PIECE):
            done = max(before, cell.row * ROW) + 1
            if before < place < done:
                raise InputError(
                    f"{file}: no text in it ends at place {place}, which the state of its stream names, as another "
                    "version wrote it: start over (--fresh, or checkpoints.load_lr_scheduler: false)"
                )
            if done > place:
                yield Piece(cell.text, done, cell.last)
            before = done

    def fingerprint(self, times: bool) -> str:
        digest = hashlib.blake2b(self._rules(), digest_size=16)
        for file in self.files:
            stat = _stat(file) if times else None
            changed = stat.version if isinstance(stat, RemoteStat) else stat.st_mtime_ns if stat else 0
            digest.update(f"\n{file.name} {self._sizes[file]} {changed}".encode())
        return digest.hexdigest()

    def _table(self, span: Span, file: AnyPath) -> Iterator[Piece]:
        from .tables import table_documents

        for cell in table_documents(file, self.column, span.start, span.stop, self.hook, self._bad, LONGEST_PIECE):
            yield Piece(cell.text, int(cell.share * span.size), cell.last)

    def _rows(self, stream: IO[bytes], raw: IO[bytes], file: AnyPath, span: Span) -> Iterator[tuple[str, bool]]:
        with self._damage_told(raw, file):
            for text in json_documents(stream, self.column, file, span.start, span.stop, self.hook, self._bad):
                yield text, True

    def _pieces(self, stream: IO[bytes], raw: IO[bytes], file: AnyPath, _: Span) -> Iterator[tuple[str, bool]]:
        """The pieces of a text file, each with whether it is the last."""
        waiting: str | None = None
        reader = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")  # closes `stream` with its own end
        with self._damage_told(raw, file):
            try:
                whole = iter(reader.read, "")
                for text in (
                    whole if self.piece is None else cut(iter(partial(reader.readline, self.piece), ""), self.piece)
                ):
                    if waiting is not None:
                        yield waiting, False
                    waiting = text
            except UnicodeDecodeError as error:
                found, place = error.object[error.start], stream.tell() - len(error.object) + error.start
                self._bad(f"{file}: not UTF-8 (byte 0x{found:02x} at {place:,}: {error.reason}); convert it first")
        if waiting is not None:
            yield waiting, True

    @contextmanager
    def _damage_told(self, raw: IO[bytes], file: AnyPath) -> Iterator[None]:
        """The place told is how far the packed file was read, 128 KiB at most behind the damage."""
        try:
            yield
        except DAMAGE as error:
            form = "zstd" if file.suffix == ".zst" else "gzip"
            self._bad(f"{file}: damaged {form} file, near byte {raw.tell():,}: {error}")

    def _bad(self, problem: str) -> None:
        if not self.skip_bad:
            raise InputError(problem) from None
        self.skipped += 1

    def _rules(self) -> bytes:
        return f"files {self.column} {self.piece} {LONGEST_PIECE} {self.skip_bad}".encode()


def cut(lines: Iterable[str], piece: int) -> Iterator[str]:
    """Cut a text after `piece` characters at a blank line, after twice as many at any line end, and never inside a
    line shorter than `piece`. `lines` keep their ends; a longer one than `piece` comes in parts of that length."""
    waiting: list[str] = []
    length = 0
    for line in lines:
        waiting.append(line)
        length += len(line)
        if length >= 2 * piece or (length >= piece and line.isspace()):
            yield "".join(waiting)
            waiting, length = [], 0
    if waiting:
        yield "".join(waiting)


def _lines_of(text: str, longest: int) -> Iterator[str]:
    """The lines of `text`, as a stream's `readline(longest)` gives them; a stream would copy all of it."""
    start = 0
    while start < len(text):
        end = LINE_END.search(text, start, start + longest)
        stop = end.end() if end else min(start + longest, len(text))
        yield text[start:stop]
        start = stop


def short_pieces(piece: Piece, longest: int) -> Iterator[Piece]:
    """A piece of more than `longest` characters in shorter ones."""
    if len(piece.text) <= longest:
        yield piece
        return
    waiting = ""
    for text in cut(_lines_of(piece.text, longest), longest):
        if waiting:
            yield Piece(waiting, piece.done, last=False)
        waiting = text
    yield piece._replace(text=waiting)


def json_documents(
    stream: IO[bytes],
    column: str,
    file: AnyPath,
    start: int,
    stop: int | None,
    hook: RowHook | None,
    bad: Callable[[str], None],
) -> Iterator[str]:
    """The documents of the lines that begin between the bytes `start` and `stop`. Blank lines are left out.

    `bad` is told what is wrong with a line; where it returns, the line is left out.
    """
    if start:
        stream.seek(start - 1)
        _to_line_end(stream)
    place, number = (stream.tell() if start else 0), 0
    while stop is None or place < stop:
        line = stream.readline(LONGEST_LINE + 1)
        if not line:
            return
        number += 1
        where = f"{file}: line at byte {place:,}" if start else f"{file}:{number}"
        place += len(line)
        if len(line) > LONGEST_LINE:
            place += _to_line_end(stream)
            bad(f"{where}: a line of more than {LONGEST_LINE >> 20} MiB (at byte {place:,} it is over)")
        elif not line.isspace():
            yield from _json_row(line, where, column, file, hook, bad)


def _to_line_end(stream: IO[bytes]) -> int:
    """Reads the rest of a line, however long; the bytes that it has."""
    read = 0
    while block := stream.readline(1 << 20):
        read += len(block)
        if block.endswith(b"\n"):
            break
    return read


def _json_row(
    line: bytes, where: str, column: str, file: AnyPath, hook: RowHook | None, bad: Callable[[str], None]
) -> list[str]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        bad(f"{where}: not UTF-8 (byte {error.start} of the line: {error.reason})")
        return []
    except (ValueError, RecursionError) as error:
        bad(f"{where}: expected one JSON object a line, found: {error}")
        return []
    if hook is not None and isinstance(row, dict):
        return [whole_characters(text) for text in hook(row, str(file))]
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        bad(f"{where}: {missing_column(column, row)}")
        return []
    return [whole_characters(text)]


def whole_characters(text: str) -> str:
    """`text` with a question mark for half a surrogate pair, which JSON may escape and no UTF-8 holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def missing_column(column: str, row: object) -> str:
    """What to say of a row whose text column is not a string."""
    if not isinstance(row, dict):
        return f"expected a JSON object with a text column {column!r}, found {type(row).__name__}"
    if column in row:
        return f"column {column!r} must hold text, found {type(row[column]).__name__}"
    names = ", ".join(name if name.isprintable() else repr(name) for name in sorted(row))
    return f"no text column {column!r}; found {names or 'nothing'}{nearest(column, filter(str.isprintable, row))}"


def find_files(path: str | AnyPath, key: str) -> list[AnyPath]:
    """The files under `path` in an order that never varies: itself, or those of a folder with a text suffix.

    A folder without any such file gives all its files. Hidden files and folders are left out.
    """
    root = as_path(path)
    if root.is_file():
        if root.suffix in FOREIGN_SUFFIXES:
            raise InputError(
                f"{key}: expected text, jsonl, .gz or .zst of them, parquet or arrow, found {path}; unpack it first"
            )
        return [root]
    if not root.is_dir():
        raise no_such_path(key, path)
    found: list[AnyPath]
    if isinstance(root, RemotePath):
        found = list(root.walk())
    else:
        with _readable(root):
            os.listdir(root)
        below = [Path(folder, name) for folder, names in _walk(root, lambda n: n.startswith(".")) for name in names]
        in_order = sorted(below, key=Path.as_posix)
        found = [*in_order]
    found = [file for file in found if file.suffix not in FOREIGN_SUFFIXES and not file.name.startswith(".")]
    if not found:
        raise InputError(f"{key}: folder {path} holds no text file")
    return [file for file in found if _unpacked_name(file).endswith(TEXT_SUFFIXES)] or found


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
    files: list[AnyPath] = [root / file for file in sorted(found, key=Path.as_posix)]
    if not files:
        raise InputError(f"dataset.corpus: this Python has no library sources under {root}")
    return FileTexts("python-stdlib", files, piece=None, skip_bad=True)


def _walk(root: Path, is_outside: Callable[[str], bool]) -> Iterator[tuple[str, list[str]]]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not is_outside(name)]
        yield folder, names


def has_rows(file: AnyPath) -> bool:
    """Whether a file holds rows with columns, not one text."""
    return _is_json(file) or file.suffix in TABLE_SUFFIXES


def _is_json(file: AnyPath) -> bool:
    return _unpacked_name(file).endswith(JSON_SUFFIXES)


def _unpacked_name(file: AnyPath) -> str:
    return file.name.removesuffix(file.suffix) if file.suffix in PACKED_SUFFIXES else file.name


def _unpacked(raw: IO[bytes], suffix: str) -> IO[bytes]:
    """The content of a file that its suffix says is packed, as a stream; damage raises one of `DAMAGE`."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    return io.BufferedReader(_Zstd(raw), 1 << 17) if suffix == ".zst" else raw  # type: ignore[return-value]


class _Zstd(io.RawIOBase):
    """What a zstd file unpacks to, by Arrow (Python has zstd from 3.14 on)."""

    def __init__(self, raw: IO[bytes]) -> None:
        import pyarrow

        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
        self._place = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            if error.errno is not None:  # the disk's, not Arrow's
                raise
            raise EOFError(str(error)) from None
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)

    def tell(self) -> int:
        return self._place


def _stat(file: AnyPath) -> os.stat_result | RemoteStat:
    with _readable(file):
        return file.stat()


@contextmanager
def _readable(path: AnyPath) -> Iterator[None]:
    """Turns every way in which reading `path` fails into one line that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from None
