"""The interface of a set of documents, for all formats.

Every source of documents has its `name`, keys that change with the content (`signature`, which is cheap, and
`content_hash`, which reads it), its `size`, and the documents in a fixed order. Files and datasets are also read by
ranges, each of which is found without reading the previous ones:

    a.jsonl   |--------|--------|----|      cut at line ends near multiples of the requested size
    b.jsonl.gz, b.jsonl.zst, c.txt          one range each
    d.parquet |------------|---------|      cut between row groups

Sources: `file_documents.FileDocuments`, `hub_datasets.HubDocuments`, `sft.SftDocuments`.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kenotron.config.errors import InputError, nearest

LONGEST_CHUNK = 1 << 19
"""Characters of a document that are encoded at a time; an encoding takes some hundred bytes per character."""

YOUNG = 2.0
"""Seconds within which a second change of a file may not change its time, so that the time proves nothing."""

LINE_END = re.compile(r"\r\n|\r|\n")

RowHook = Callable[[dict[str, Any], str], list[str]]
"""(row with all columns, file name) → its documents; raises NoText."""


class NoText(InputError):
    """A row has no text in the expected column; the message says what it has instead."""


# ---- chunks and sources ------------------------------------------------------------------------------------


class DocumentChunk(NamedTuple):
    """A document or a chunk of one: its text, the work done after reading it, and whether it is the last chunk."""

    text: str
    done: int
    last: bool = True


@dataclass(slots=True)
class TextChunk:
    """A chunk of text to encode, with the work `done` so far, and whether a document starts and ends with it."""

    text: str
    done: int
    starts: bool
    ends: bool


class ByteRange(NamedTuple):
    """A range of documents that is read independently: from `start` to `stop` in file or dataset number `part`.

    `start` and `stop` count bytes of a jsonl file, row groups of a parquet file, or rows of a dataset; `stop` None: the
    end. `size` is in bytes, estimated for a dataset.
    """

    part: int
    start: int
    stop: int | None
    size: int


class DocumentSource(Protocol):
    """A finite sequence of documents."""

    name: str
    skip_bad: bool
    skipped: int
    first_skipped: list[str]
    """`skip_bad`: whether unreadable documents are left out. Since the last call of `documents`, `skipped` counts those
    left out (lines, ends of files), and `first_skipped` has the problems of the first ones, with their positions."""

    @property
    def size(self) -> int:
        """Return the total work in the unit of `DocumentChunk.done`, bytes or rows."""

    def signature(self) -> str | None:
        """Return a cheap key that changes if the content may have changed; None if there is no cheap key."""

    def content_hash(self) -> str:
        """Return a hash of the content, equal for equal documents."""

    def documents(self) -> Iterator[DocumentChunk]:
        """Yield every document; long ones come in chunks."""


class MayBeBad:
    """Documents that are the `column` of rows, or the result of `hook` for a row. The first one that cannot be read is
    an error, or all such documents are left out and counted.

    `tell`, if set, is called with a line about the first few of them, the 10th, the 100th and so on, as streams are
    endless.
    """

    FIRST = 3  # the number of documents that are named

    def __init__(self, column: str, hook: RowHook | None, skip: bool, advice: str) -> None:
        self.column, self.hook = column, hook
        self.skip_bad, self._advice = skip, advice
        self.tell: Callable[[str], None] | None = None
        self.count_anew()

    def count_anew(self) -> None:
        """Reset the count of documents that were left out."""
        self.skipped, self.first_skipped = 0, list[str]()

    def bad(self, problem: str) -> None:
        """Leave a document out and count it. Raises InputError unless documents may be left out."""
        if not self.skip_bad:
            raise InputError(f"{problem}{self._advice}") from None
        self.skipped += 1
        if len(self.first_skipped) < self.FIRST:
            self.first_skipped.append(problem)
        if self.tell is not None and (self.skipped <= self.FIRST or str(self.skipped).strip("0") == "1"):
            self.tell(f"left out as not readable ({self.skipped:,} so far): {problem}")

    @contextmanager
    def no_text_is_bad(self, where: str) -> Iterator[None]:
        """Treat a row without text, the one at `where`, as `bad` within the block."""
        try:
            yield
        except NoText as error:
            self.bad(f"{where}: {error}")


class StreamableDocuments(DocumentSource, Protocol):
    """Documents that can be read by ranges, and from any position in their files or shards; `tell`: see `MayBeBad`."""

    tell: Callable[[str], None] | None

    def byte_ranges(self, size: int) -> Iterator[ByteRange]:
        """Yield ranges that cover all documents, of at most `size` bytes if the format can be cut."""

    def read(self, byte_range: ByteRange) -> Iterator[DocumentChunk]:
        """Yield the documents of a range; `DocumentChunk.done` counts its bytes."""

    @property
    def parts(self) -> int:
        """The number of files or shards that a stream reads one after the other."""

    def chunks_from(self, part: int, place: int) -> Iterator[DocumentChunk]:
        """Yield a file's or shard's chunks from position `place` (0: the start) on; `done`: the position after each."""

    def fingerprint(self, times: bool) -> str:
        """Return a key of the names and sizes of the files or shards, with `times` also of their last changes."""


# ---- text --------------------------------------------------------------------------------------------------


def cut(lines: Iterable[str], chunk: int) -> Iterator[str]:
    """Cut a text after `chunk` characters at a blank line, after twice as many at any line end, and never inside a
    line shorter than `chunk`. `lines` keep their line ends; a line longer than `chunk` comes in pieces of this size."""
    waiting: list[str] = []
    length = 0
    for line in lines:
        waiting.append(line)
        length += len(line)
        if length >= 2 * chunk or (length >= chunk and line.isspace()):
            yield "".join(waiting)
            waiting, length = [], 0
    if waiting:
        yield "".join(waiting)


def _lines_of(text: str, longest: int) -> Iterator[str]:
    """Yield the lines of `text` like a stream's `readline(longest)`, without the copy that a stream would make."""
    start = 0
    while start < len(text):
        end = LINE_END.search(text, start, start + longest)
        stop = end.end() if end else min(start + longest, len(text))
        yield text[start:stop]
        start = stop


def split_long_chunk(chunk: DocumentChunk, longest: int) -> Iterator[DocumentChunk]:
    """Split a chunk of more than `longest` characters into shorter ones."""
    if len(chunk.text) <= longest:
        yield chunk
        return
    waiting = ""
    for text in cut(_lines_of(chunk.text, longest), longest):
        if waiting:
            yield chunk._replace(text=waiting, last=False)
        waiting = text
    yield chunk._replace(text=waiting)


def whole_characters(text: str) -> str:
    """Replace lone surrogates, which JSON may escape but UTF-8 cannot encode, by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def texts_of_row(row: object, column: str, hook: RowHook | None, file: str) -> list[str]:
    """Return the documents of a row: its `column`, or the result of `hook`. Raises NoText."""
    if hook is not None and isinstance(row, dict):
        return [whole_characters(text) for text in hook(row, file)]
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise NoText(missing_column(column, row))
    return [whole_characters(text)]


def missing_column(column: str, row: object) -> str:
    """Return the message about a row whose text column is not a string."""
    if not isinstance(row, dict):
        return f"expected a JSON object with a text column {column!r}, found {type(row).__name__}"
    if column in row:
        found = "null" if row[column] is None else type(row[column]).__name__
        return f"column {column!r} must hold text, found {found}"
    names = ", ".join(name if name.isprintable() else repr(name) for name in sorted(row))
    near = nearest(column, filter(str.isprintable, row)) or "; text_column_name, or --column, names another"
    return f"no text column {column!r}; found {names or 'nothing'}{near}"
