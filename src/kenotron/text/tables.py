"""Documents of parquet and arrow files, a few rows at a time.

    rows.parquet   row group 0 | row group 1 | …      a byte_range is a run of row groups
    rows.arrow     batch, batch, …                    one byte_range; memory-mapped

Only the text column is read, unless a hook wants whole rows. Values are decoded here, so that bytes that are no UTF-8
are found in the row that has them.
"""

from __future__ import annotations

import codecs
import io
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kenotron.config.errors import InputError
from kenotron.storage.hub import first_line
from kenotron.storage.paths import AnyPath, RemotePath
from kenotron.text.documents import NoText, RowChunk, RowHook, cut, missing_column, whole_characters

if TYPE_CHECKING:
    from pyarrow import parquet as pq

ROWS_AT_ONCE, BYTES_AT_ONCE = 256, 1 << 25
"""Rows that are in memory at a time: at most so many, and of about so many bytes."""

READ_BYTES = 1 << 20
"""Bytes that pyarrow reads of a column at once, where a page is not larger."""

LARGEST_PAGE, LARGEST_PAGE_VARIABLE = 128, "KENOTRON_PARQUET_PAGE_MIB"
"""MiB of a page of a parquet file, unpacked, and the environment variable that sets another number. A page is in
memory packed, unpacked and as values; a text within one cannot be read in chunks."""


def largest_page() -> int:
    """Bytes. Error (InputError): the variable holds no number."""
    text = os.environ.get(LARGEST_PAGE_VARIABLE) or str(LARGEST_PAGE)
    if not text.isdecimal() or not int(text):
        raise InputError(f"{LARGEST_PAGE_VARIABLE}: expected a number of MiB above 0, found {text!r}")
    return int(text) << 20


class ParquetReader:
    """Parquet files; a range is a run of row groups. (`documents.RowReader`)"""

    def ranges(self, file: AnyPath, whole: int, size: int) -> Iterator[tuple[int, int | None, int]]:
        """Runs of row groups of about `size` of the file's `whole` bytes: first, end, bytes."""
        with _explained(file), _parquet(file) as (opened, _):
            rows = [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]
        sizes = [whole * count // max(sum(rows), 1) for count in rows]
        first, held = 0, 0
        for group, group_size in enumerate(sizes):
            if held and held + group_size > size:
                yield first, group, held
                first, held = group, 0
            held += group_size
        yield first, len(sizes), held

    def start_of(self, file: AnyPath, row: int) -> int:
        """The row group that holds a row, the last one for rows beyond it."""
        with _explained(file), _parquet(file) as (opened, _):
            groups = opened.metadata.num_row_groups
            ends = accumulate(opened.metadata.row_group(group).num_rows for group in range(groups))
            return next((group for group, end in enumerate(ends) if row < end), max(groups - 1, 0))

    def read(
        self,
        file: AnyPath,
        column: str,
        start: int,
        stop: int | None,
        hook: RowHook | None,
        bad: Callable[[str], None],
        longest: int,
    ) -> Iterator[RowChunk]:
        """As `documents.RowReader.read`; a row group with a page that is too large is reported to `bad`, too."""
        batches = _parquet_batches(file, column if hook is None else None, start, stop, bad)
        yield from _documents(file, batches, column, hook, bad, longest)


class ArrowReader:
    """Arrow files, memory-mapped, in one range. (`documents.RowReader`)"""

    def ranges(self, file: AnyPath, whole: int, size: int) -> Iterator[tuple[int, int | None, int]]:
        """All of it."""
        yield 0, None, whole

    def start_of(self, file: AnyPath, row: int) -> int:
        """Its beginning."""
        return 0

    def read(
        self,
        file: AnyPath,
        column: str,
        start: int,
        stop: int | None,
        hook: RowHook | None,
        bad: Callable[[str], None],
        longest: int,
    ) -> Iterator[RowChunk]:
        """As `documents.RowReader.read`."""
        batches = _arrow_batches(file, column if hook is None else None)
        yield from _documents(file, batches, column, hook, bad, longest)


def _documents(
    file: AnyPath,
    batches: Iterator[_Rows],
    column: str,
    hook: RowHook | None,
    bad: Callable[[str], None],
    longest: int,
) -> Iterator[RowChunk]:
    """The documents of all rows of the batches."""
    with _explained(file):
        for some in batches:
            if hook is None:
                for row, data in enumerate(_bytes_of(_values_of(some.batch, column, file)), start=some.first):
                    for text, last in _decoded(data, column, f"{file}, row {row:,}", bad, longest, some.release):
                        yield RowChunk(text, last, row, some.share)
            else:
                some.batch.validate(full=True)
                for row, record in enumerate(some.batch.to_pylist(), start=some.first):
                    try:
                        texts = hook(record, str(file))
                    except NoText as error:
                        bad(f"{file}, row {row:,}: {error}")
                        continue
                    for text in texts:
                        yield RowChunk(whole_characters(text), True, row, some.share)
            some.release()


def _decoded(
    data: Any, column: str, where: str, bad: Callable[[str], None], longest: int, release: Callable[[], None]
) -> Iterator[tuple[str, bool]]:
    """The text of a value, in chunks where it is long, each with whether it is the last."""
    if data is None:
        bad(f"{where}: {missing_column(column, {column: None})}")
        return
    done = 0
    try:
        if data.size <= longest:
            yield str(data, "utf-8"), True
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, data.size, longest):  # all of it, before its first chunk is returned
            done = start - len(decoder.getstate()[0])
            decoder.decode(data[start : start + longest], final=start + longest >= data.size)
            release()
    except UnicodeDecodeError as error:
        bad(f"{where}: not UTF-8 (byte {done + error.start} of the text: {error.reason})")
        return
    import pyarrow as pa

    waiting = ""
    lines = io.TextIOWrapper(pa.BufferReader(data), encoding="utf-8", newline="")
    for text in cut(iter(partial(lines.readline, longest), ""), longest):
        if waiting:
            yield waiting, False
            release()
        waiting = text
    yield waiting, True


def _values_of(batch: Any, column: str, file: AnyPath) -> Any:
    """The column as bytes."""
    import pyarrow as pa

    values = batch.column(column)
    if pa.types.is_dictionary(values.type):  # pandas' categories
        values.validate(full=True)
        values = values.dictionary_decode()
    kind = values.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{file}: column '{column}' must hold text, found {kind}")
    values = values.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    values.validate(full=True)  # that its texts lie within the file: reading others would end the process
    return values


def _bytes_of(values: Any) -> Iterator[Any]:
    """The bytes of each value, None for a missing one. Asking the array for a value would copy it."""
    import pyarrow as pa

    _, ends, data = values.buffers()
    width = np.dtype("<i4" if pa.types.is_binary(values.type) else "<i8")
    count = len(values) + 1 if len(values) else 0
    bounds = np.frombuffer(ends or b"", width, count, values.offset * width.itemsize if count else 0).tolist()
    for valid, (start, stop) in zip(values.is_valid().to_pylist(), pairwise(bounds)):
        yield (pa.py_buffer(b"") if data is None else data.slice(start, stop - start)) if valid else None


class _Rows(NamedTuple):
    """A few rows: the number of the first one, the share of the rows done before it, and how to let go of the memory
    that their reading took."""

    first: int
    share: float
    batch: Any
    release: Callable[[], None]


def _arrow_batches(file: AnyPath, column: str | None) -> Iterator[_Rows]:
    with _mapped(file) as (source, release):
        row, size = 0, max(source.size(), 1)
        for batch in _record_batches(source):
            _check_column(file, column, batch.schema.names)
            step = _rows_at_once(batch.nbytes, batch.num_rows)
            for first in range(0, batch.num_rows, step):
                yield _Rows(row + first, source.tell() / size, batch.slice(first, step), release)
            row += batch.num_rows


@contextmanager
def _mapped(file: AnyPath) -> Iterator[tuple[Any, Callable[[], None]]]:
    """A file as pyarrow reads it, one of this machine memory-mapped, and how to let go of what was read of it."""
    import pyarrow as pa

    if isinstance(file, RemotePath):
        with pa.PythonFile(file.open(), "r") as source:
            yield source, lambda: None
        return
    with file.open("rb") as stream:
        if not os.fstat(stream.fileno()).st_size:
            raise pa.ArrowInvalid("it is empty")
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    # Never closed: batches of it may be in use still. It goes with the last of them.
    yield pa.BufferReader(pa.py_buffer(mapped)), partial(mapped.madvise, mmap.MADV_DONTNEED)


def _record_batches(source: Any) -> Iterator[Any]:
    """Of a file in either of arrow's two forms; `datasets` writes streams."""
    from pyarrow import ipc

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if is_file:
        reader = ipc.open_file(source)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from ipc.open_stream(source)


def _parquet_batches(
    file: AnyPath, column: str | None, start: int, stop: int | None, bad: Callable[[str], None]
) -> Iterator[_Rows]:
    with _parquet(file) as (opened, reads):
        _check_column(file, column, opened.schema_arrow.names)
        counts = [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]
        first = sum(counts[:start])
        rows = max(sum(counts[start:stop]), 1)
        columns = None if column is None else [column]
        for group in range(len(counts))[start:stop]:
            row = sum(counts[:group])
            try:
                _check_columns(opened, reads, group, columns)
                step = reads.expect(opened.metadata.row_group(group), column)
                for batch in opened.iter_batches(step, [group], columns, use_threads=False):
                    yield _Rows(row, (row - first) / rows, batch, lambda: None)
                    row += batch.num_rows
            except _PageTooLarge as error:
                bad(f"{file}, row {row:,}: {error}")


def _check_columns(opened: pq.ParquetFile, reads: _PageReads, group: int, columns: list[str] | None) -> None:
    """Raise what pyarrow finds wrong in the metadata of a row group's columns.

    They are asked for below without a reader, and what they throw there ends the process: pyarrow catches it only
    where it reads. So a reader is made of them first, and stopped at the first byte that it wants.
    """
    reads.stopped = True
    try:
        next(opened.iter_batches(1, [group], columns, use_threads=False), None)
    except _Stopped:
        pass
    finally:
        reads.stopped = False


class _Stopped(Exception):
    """A byte was asked for where only metadata are checked."""


class _PageTooLarge(Exception):
    """A page of a column, by its estimated size in bytes."""

    def __init__(self, column: str, size: float, largest: int) -> None:
        mib = math.ceil(size / 2**20)
        super().__init__(
            f"a page of column '{column}' holds about {mib:,} MiB, and a page is decoded at once; expected at most "
            f"{largest >> 20} MiB: set {LARGEST_PAGE_VARIABLE}={mib} (reading it takes up to {5 * mib:,} MiB), or "
            "write the file again with fewer rows per row group"
        )


class _PageReads:
    """A parquet file that refuses to read a page that is too large, before memory is allocated for it.

    Parquet's metadata hold sizes of column chunks, not of pages. pyarrow reads a chunk through a buffer of
    `READ_BYTES`, and a larger page by one read of its packed bytes; the chunk's ratio gives the unpacked size.
    """

    closed = False
    stopped = False
    """Raise _Stopped instead of reading."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._largest = stream, 0
        self._chunks: list[tuple[int, int, str, float]] = []  # of the row group: first byte, end, column, ratio

    def expect(self, group: pq.RowGroupMetaData, column: str | None) -> int:
        """The row group that is read next (all columns if `column` is None): how many of its rows to decode at once.

        Raises _PageTooLarge: a page that is read through the buffer may be too large.
        """
        self._largest = largest = largest_page()
        step, self._chunks = _rows_at_once(group.total_byte_size, group.num_rows), []
        for chunk in map(group.column, range(group.num_columns)):
            if column is not None and chunk.path_in_schema != column:
                continue
            begin = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
            packed, ratio = (
                chunk.total_compressed_size,
                chunk.total_uncompressed_size / max(chunk.total_compressed_size, 1),
            )
            dictionary = chunk.data_page_offset - begin if chunk.has_dictionary_page else 0
            if (size := min(packed, max(dictionary, READ_BYTES)) * ratio) > largest:
                raise _PageTooLarge(chunk.path_in_schema, size, largest)
            if chunk.total_uncompressed_size > largest:
                self._chunks.append((begin, begin + packed, chunk.path_in_schema, ratio))
            step = min(step, int(largest // max(dictionary * ratio, 1)))  # every row may be its largest entry
        return max(step, 1)

    def read(self, size: int = -1) -> bytes:
        """As a file's. Raises _PageTooLarge, _Stopped."""
        if self.stopped:
            raise _Stopped
        if size > READ_BYTES and self._chunks:
            at = self._stream.tell()
            for start, stop, column, ratio in self._chunks:
                if start <= at < stop and size * ratio > self._largest:
                    raise _PageTooLarge(column, size * ratio, self._largest)
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As a file's."""
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """As a file's."""
        return self._stream.tell()

    def close(self) -> None:
        """As a file's."""
        self._stream.close()


def _rows_at_once(size: int, rows: int) -> int:
    """How many of so many rows of `size` bytes in all."""
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * rows // max(size, 1)))


@contextmanager
def _parquet(file: AnyPath) -> Iterator[tuple[pq.ParquetFile, _PageReads]]:
    from pyarrow import parquet

    with file.open("rb") as stream:
        reads = _PageReads(stream)
        with parquet.ParquetFile(reads, buffer_size=READ_BYTES, pre_buffer=False) as opened:
            yield opened, reads


def _check_column(file: AnyPath, column: str | None, names: list[str]) -> None:
    if column is not None and column not in names:
        raise InputError(f"{file}: {missing_column(column, dict.fromkeys(names))}")


@contextmanager
def _explained(file: AnyPath) -> Iterator[None]:
    """What pyarrow finds wrong, as one line."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: names of columns
        raise InputError(f"{file}: damaged {file.suffix[1:]} file: {first_line(error)}") from None
