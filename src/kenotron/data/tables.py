"""Documents of parquet and arrow files, a few rows at a time.

    rows.parquet   row group 0 | row group 1 | …      a span is a run of row groups
    rows.arrow     batch, batch, …                    one span; memory-mapped

Only the text column is read, unless a hook wants whole rows. Values are decoded here, so that bytes that are no UTF-8
are found in the row that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kenotron.config.errors import InputError

from .hub import first_line
from .remote import AnyPath, RemotePath
from .texts import RowHook, missing_column, whole_characters

ROWS_AT_ONCE, BYTES_AT_ONCE = 256, 1 << 25
"""Rows that are in memory at a time: at most so many, and of about so many bytes."""


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


def row_group_of(file: AnyPath, row: int) -> tuple[int, int]:
    """The row group that holds a row (the last one for rows beyond it), and how many rows lie before the group."""
    with _explained(file), _parquet(file) as opened:
        before = 0
        for group in range(opened.metadata.num_row_groups):
            rows = opened.metadata.row_group(group).num_rows
            if row < before + rows or group == opened.metadata.num_row_groups - 1:
                return group, before
            before += rows
    return 0, 0


def table_documents(
    file: AnyPath, column: str, start: int, stop: int | None, hook: RowHook | None, bad: Callable[[str], None]
) -> Iterator[tuple[str, float]]:
    """Every document of the rows of row groups `start` to `stop`, with the share of the rows done.

    `bad` is told what is wrong with a row; where it returns, the row is left out.
    """
    with _explained(file):
        for first, done, batch in _batches(file, column if hook is None else None, start, stop):
            if hook is None:
                values = _bytes_of(batch, column, file)
                for row, value in enumerate(values, start=first):
                    text = _decoded(value, column, f"{file}, row {row:,}", bad)
                    if text is not None:
                        yield text, done
            else:
                batch.validate(full=True)
                for record in batch.to_pylist():
                    for text in hook(record, str(file)):
                        yield whole_characters(text), done


def _decoded(value: bytes | None, column: str, where: str, bad: Callable[[str], None]) -> str | None:
    if value is None:
        bad(f"{where}: {missing_column(column, {column: value})}")
        return None
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        bad(f"{where}: not UTF-8 (byte {error.start} of the text: {error.reason})")
        return None


def _bytes_of(batch: Any, column: str, file: AnyPath) -> list[bytes | None]:
    import pyarrow as pa

    kind = batch.schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{file}: column '{column}' must hold text, found {kind}")
    values = batch.column(column).view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    values.validate(full=True)  # that its texts lie within the file: reading others would end the process
    return values.to_pylist()


def _batches(file: AnyPath, column: str | None, start: int, stop: int | None) -> Iterator[tuple[int, float, Any]]:
    """Number of the first row, share of the rows done before it, and a few rows."""
    if file.suffix == ".parquet":
        yield from _parquet_batches(file, column, start, stop)
        return
    import pyarrow as pa

    opened = pa.PythonFile(file.open(), "r") if isinstance(file, RemotePath) else pa.memory_map(str(file))
    with opened as source:
        row, size = 0, max(source.size(), 1)
        for batch in _arrow_batches(source):
            _check_column(file, column, batch.schema.names)
            step = _rows_at_once(batch.nbytes, batch.num_rows)
            for first in range(0, batch.num_rows, step):
                yield row + first, source.tell() / size, batch.slice(first, step)
            row += batch.num_rows


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
    file: AnyPath, column: str | None, start: int, stop: int | None
) -> Iterator[tuple[int, float, Any]]:
    with _parquet(file) as opened:
        _check_column(file, column, opened.schema_arrow.names)
        counts = [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]
        first = row = sum(counts[:start])
        rows = max(sum(counts[start:stop]), 1)
        groups = list(range(len(counts)))[start:stop]
        columns = None if column is None else [column]
        for group in groups:
            found = opened.metadata.row_group(group)
            step = _rows_at_once(found.total_byte_size, found.num_rows)
            for batch in opened.iter_batches(step, [group], columns, use_threads=False):
                yield row, (row - first) / rows, batch
                row += batch.num_rows


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
