"""What a set of documents is, whatever it is read from.

Every source of documents has the same few methods: what it is (`name`), whether it changed (`signature`, cheap, and
`content_hash`, by reading), its `size`, and the documents in an order that never varies. Files and datasets are also
read by ranges, each of which is found without reading those before it:

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
"""Characters of a document that are encoded at once: an encoding takes some hundred bytes for each."""

YOUNG = 2.0
"""Seconds within which a second change of a file may leave its time unchanged, so that the time proves nothing."""

LINE_END = re.compile(r"\r\n|\r|\n")

RowHook = Callable[[dict[str, Any], str], list[str]]
"""The documents of a row (all its columns) of the file so named; raises NoText."""


class NoText(InputError):
    """A row has no text where a hook keeps it; the message says what it has."""


# ---- chunks and sources ------------------------------------------------------------------------------------


class DocumentChunk(NamedTuple):
    """A document or a chunk of one: its text, the work done once it is read, and whether it is the document's last."""

    text: str
    done: int
    last: bool = True


@dataclass(slots=True)
class TextChunk:
    """A chunk of text as it is encoded: with the work `done` so far, and whether a document starts and ends with it."""

    text: str
    done: int
    starts: bool
    ends: bool


class ByteRange(NamedTuple):
    """Documents that are read by themselves: of file or dataset number `part`, from `start` to `stop`.

    `start` and `stop` count bytes of a jsonl file, row groups of a parquet file, rows of a dataset; `stop` None: all of
    it. `size`: bytes, of a dataset an estimate.
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
    """Whether documents that cannot be read are left out; how many were since the last call of `documents` (lines, ends
    of files), and what was wrong with the first of them, and where."""

    @property
    def size(self) -> int:
        """All the work, in the unit that `DocumentChunk.done` counts: bytes or rows."""

    def signature(self) -> str | None:
        """Cheap to get, and another one when the content may be another; None when nothing cheap is known."""

    def content_hash(self) -> str:
        """Names the content; equal for equal documents."""

    def documents(self) -> Iterator[DocumentChunk]:
        """Every document, in chunks where it is long."""


class MayBeBad:
    """Documents are the `column` of rows, or what `hook` makes of a row. Of those that cannot be read the first one is
    an error, or all are left out and counted.

    `tell`, if it is set, gets a line about the first few of them, the 10th, the 100th and so on: a stream has no end.
    """

    FIRST = 3  # so many are named

    def __init__(self, column: str, hook: RowHook | None, skip: bool, advice: str) -> None:
        self.column, self.hook = column, hook
        self.skip_bad, self._advice = skip, advice
        self.tell: Callable[[str], None] | None = None
        self.count_anew()

    def count_anew(self) -> None:
        """Nothing has been left out yet."""
        self.skipped, self.first_skipped = 0, list[str]()

    def bad(self, problem: str) -> None:
        """Leaves a document out. Raises InputError where that was not asked for."""
        if not self.skip_bad:
            raise InputError(f"{problem}{self._advice}") from None
        self.skipped += 1
        if len(self.first_skipped) < self.FIRST:
            self.first_skipped.append(problem)
        if self.tell is not None and (self.skipped <= self.FIRST or str(self.skipped).strip("0") == "1"):
            self.tell(f"left out as not readable ({self.skipped:,} so far): {problem}")

    @contextmanager
    def no_text_is_bad(self, where: str) -> Iterator[None]:
        """Within, a row without text is `bad`: the one at `where`."""
        try:
            yield
        except NoText as error:
            self.bad(f"{where}: {error}")


class StreamableDocuments(DocumentSource, Protocol):
    """Documents that can be read by ranges, and in several parts each from a place in it; `tell` as in `MayBeBad`."""

    tell: Callable[[str], None] | None

    def byte_ranges(self, size: int) -> Iterator[ByteRange]:
        """All documents, in byte_ranges of at most `size` bytes where their form allows to cut them so."""

    def read(self, byte_range: ByteRange) -> Iterator[DocumentChunk]:
        """The documents of a byte_range; `DocumentChunk.done` counts its bytes."""

    @property
    def parts(self) -> int:
        """How many parts (files, shards) a stream reads one after the other."""

    def chunks_from(self, part: int, place: int) -> Iterator[DocumentChunk]:
        """The chunks of a part from `place` on; `done` of each is the place behind it. A part begins at place 0."""

    def fingerprint(self, times: bool) -> str:
        """Another one where names or sizes of the parts are others, or (with `times`) when they changed last."""


# ---- text --------------------------------------------------------------------------------------------------


def cut(lines: Iterable[str], chunk: int) -> Iterator[str]:
    """Cut a text after `chunk` characters at a blank line, after twice as many at any line end, and never inside a
    line shorter than `chunk`. `lines` keep their ends; a longer one than `chunk` comes in parts of that length."""
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
    """The lines of `text`, as a stream's `readline(longest)` gives them; a stream would copy all of it."""
    start = 0
    while start < len(text):
        end = LINE_END.search(text, start, start + longest)
        stop = end.end() if end else min(start + longest, len(text))
        yield text[start:stop]
        start = stop


def split_long_chunk(chunk: DocumentChunk, longest: int) -> Iterator[DocumentChunk]:
    """A chunk of more than `longest` characters in shorter ones."""
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
    """`text` with a question mark for half a surrogate pair, which JSON may escape and no UTF-8 holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def texts_of_row(row: object, column: str, hook: RowHook | None, file: str) -> list[str]:
    """The documents of a row: its `column`, or what `hook` makes of it. Raises NoText."""
    if hook is not None and isinstance(row, dict):
        return [whole_characters(text) for text in hook(row, file)]
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise NoText(missing_column(column, row))
    return [whole_characters(text)]


def missing_column(column: str, row: object) -> str:
    """What to say of a row whose text column is not a string."""
    if not isinstance(row, dict):
        return f"expected a JSON object with a text column {column!r}, found {type(row).__name__}"
    if column in row:
        found = "null" if row[column] is None else type(row[column]).__name__
        return f"column {column!r} must hold text, found {found}"
    names = ", ".join(name if name.isprintable() else repr(name) for name in sorted(row))
    near = nearest(column, filter(str.isprintable, row)) or "; text_column_name, or --column, names another"
    return f"no text column {column!r}; found {names or 'nothing'}{near}"
