"""Documents of parquet and arrow files, a few rows at a time.

    rows.parquet   row group 0 | row group 1 | …      a span is a run of row groups
    rows.arrow     batch, batch, …                    one span; memory-mapped

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
from typing import IO, Any, NamedTuple

import numpy as np

from kenotron.config.errors import InputError

from .hub import first_line
from .parquet_pages import column_pages
from .remote import AnyPath, RemotePath
from .texts import RowHook, cut, missing_column, whole_characters

ROWS_AT_ONCE, BYTES_AT_ONCE = 256, 1 << 25
"""Rows that are in memory at a time: at most so many, and of about so many bytes."""

LARGEST_PAGE, LARGEST_PAGE_VARIABLE = 128, "KENOTRON_PARQUET_PAGE_MIB"
"""MiB of a page of a parquet file, unpacked, and the environment variable that says another number. A page lies in
memory packed, unpacked and as values; a text within one cannot be read in pieces."""


def largest_page() -> int:
    """Bytes. Error (InputError): the variable holds no number."""
    told = os.environ.get(LARGEST_PAGE_VARIABLE) or str(LARGEST_PAGE)
    if not told.isdecimal() or not int(told):
        raise InputError(f"{LARGEST_PAGE_VARIABLE}: expected a number of MiB above 0, found {told!r}")
    return int(told) << 20


def row_group_spans(file: AnyPath, whole: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Runs of row groups of about `size` of the file's `whole` bytes: first, end, bytes."""
    with _explained(file), _parquet(file) as opened:
        rows = [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]
    sizes = [whole * count // max(sum(rows), 1) for count in rows]
    first, held = 0, 0
    for group, group_size in enumerate(sizes):
        if held and held + group_size > size:
            yield first, group, held
            first, held = group, 0
        held += group_size
    yield first, len(sizes), held


def row_group_of(file: AnyPath, row: int) -> int:
    """The row group that holds a row, the last one for rows beyond it."""
    with _explained(file), _parquet(file) as opened:
        groups = opened.metadata.num_row_groups
        ends = accumulate(opened.metadata.row_group(group).num_rows for group in range(groups))
        return next((group for group, end in enumerate(ends) if row < end), max(groups - 1, 0))


class Cell(NamedTuple):
    """A document or a piece of one, whether it is the document's last, the number of its row in the file, and the share
    of the rows done before."""

    text: str
    last: bool
    row: int
    share: float


def table_documents(
    file: AnyPath,
    column: str,
    start: int,
    stop: int | None,
    hook: RowHook | None,
    bad: Callable[[str], None],
    longest: int,
) -> Iterator[Cell]:
    """Every document of the rows of row groups `start` to `stop`, one of more than `longest` bytes in pieces.

    `bad` is told what is wrong with a row, or with a row group that memory does not hold; where it returns, the row or
    the group is left out.
    """
    with _explained(file):
        for some in _batches(file, column if hook is None else None, start, stop, bad):
            if hook is None:
                for row, data in enumerate(_bytes_of(_values_of(some.batch, column, file)), start=some.first):
                    for text, last in _decoded(data, column, f"{file}, row {row:,}", bad, longest, some.release):
                        yield Cell(text, last, row, some.share)
            else:
                some.batch.validate(full=True)
                for row, record in enumerate(some.batch.to_pylist(), start=some.first):
                    for text in hook(record, str(file)):
                        yield Cell(whole_characters(text), True, row, some.share)
            some.release()


def _decoded(
    data: Any, column: str, where: str, bad: Callable[[str], None], longest: int, release: Callable[[], None]
) -> Iterator[tuple[str, bool]]:
    """The text of a value, in pieces where it is long, each with whether it is the last."""
    if data is None:
        bad(f"{where}: {missing_column(column, {column: None})}")
        return
    done = 0
    try:
        if data.size <= longest:
            yield str(data, "utf-8"), True
            return
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, data.size, longest):  # all of it, before a piece of it is given away
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

    kind = batch.schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{file}: column '{column}' must hold text, found {kind}")
    values = batch.column(column).view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    values.validate(full=True)  # that its texts lie within the file: reading others would end the process
    return values


def _bytes_of(values: Any) -> Iterator[Any]:
    """Where each value lies, None for one that is missing. Asking the array for a value would copy it."""
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


def _batches(
    file: AnyPath, column: str | None, start: int, stop: int | None, bad: Callable[[str], None]
) -> Iterator[_Rows]:
    if file.suffix == ".parquet":
        yield from _parquet_batches(file, column, start, stop, bad)
        return
    with _mapped(file) as (source, release):
        row, size = 0, max(source.size(), 1)
        for batch in _arrow_batches(source):
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


def _arrow_batches(source: Any) -> Iterator[Any]:
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
    with _parquet(file) as opened, file.open("rb") as raw:
        _check_column(file, column, opened.schema_arrow.names)
        counts = [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]
        first = row = sum(counts[:start])
        rows = max(sum(counts[start:stop]), 1)
        groups = list(range(len(counts)))[start:stop]
        columns = None if column is None else [column]
        for group in groups:
            step = _step_of_group(raw, opened.metadata.row_group(group), column, f"{file}, row {row:,}", bad)
            if step is None:
                row += counts[group]
                continue
            for batch in opened.iter_batches(step, [group], columns, use_threads=False):
                yield _Rows(row, (row - first) / rows, batch, lambda: None)
                row += batch.num_rows


def _step_of_group(
    raw: IO[bytes], group: Any, column: str | None, where: str, bad: Callable[[str], None]
) -> int | None:
    """How many rows of a group to decode at once, by the sizes of its pages; None where a page is too large.

    A batch holds whole pages and parts of two, and each of its rows may be the largest entry of a dictionary.
    """
    step, largest = _rows_at_once(group.total_byte_size, group.num_rows), largest_page()
    for number in range(group.num_columns):
        chunk = group.column(number)
        if column is not None and chunk.path_in_schema != column:
            continue
        begin = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
        try:
            for page in column_pages(raw, begin, begin + chunk.total_compressed_size):
                if page.size > largest:
                    size = math.ceil(page.size / 2**20)
                    bad(
                        f"{where}: a page of column '{chunk.path_in_schema}' holds {size:,} MiB, and a page is read "
                        f"whole; expected at most {largest >> 20} MiB: set {LARGEST_PAGE_VARIABLE}={size} (reading it "
                        f"takes up to {5 * size:,} MiB), or write the file anew with fewer rows a row group"
                    )
                    return None
                fair = largest if page.is_dictionary else BYTES_AT_ONCE * page.values
                step = min(step, fair // max(page.size, 1))
        except (ValueError, OverflowError) as error:
            bad(f"{where}: damaged parquet file: {error}")
            return None
    return max(step, 1)


def _rows_at_once(size: int, rows: int) -> int:
    """How many of so many rows of `size` bytes in all."""
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * rows // max(size, 1)))


def _parquet(file: AnyPath) -> Any:
    from pyarrow import parquet

    source = file.open() if isinstance(file, RemotePath) else file
    return parquet.ParquetFile(source, buffer_size=1 << 20, pre_buffer=False)


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
