"""Read documents from parquet and arrow files, a few rows at a time.

    rows.parquet   row group 0 | row group 1 | …      a range is consecutive row groups
    rows.arrow     batch, batch, …                    one range; memory-mapped

Only the text column is read, unless a hook needs whole rows. Values are decoded in this file, so that invalid UTF-8 is
reported with its row.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

from kenotron.config.errors import InputError
from kenotron.storage.hub import first_line
from kenotron.storage.paths import AnyPath, RemotePath
from kenotron.text.documents import MayBeBad, NoText, missing_column, whole_characters

ROWS_AT_ONCE, BYTES_AT_ONCE = 256, 1 << 25
"""Limits of the rows that are in memory at a time: their number, and about their bytes."""

READ_BYTES = 1 << 20
"""Bytes of a column that pyarrow reads at a time, unless a page is larger."""


class RowDocument(NamedTuple):
    """A document of a row, the index of its row in the file, and the share of the rows that were read before."""

    text: str
    row: int
    share: float


class _Rows(NamedTuple):
    """A few rows, with the index of the first one, and the share of the rows done before it."""

    first: int
    share: float
    batch: Any


class RowReader(ABC):
    """Reads tables of one format. A range of rows goes from a start to a stop (None: the end), in the format's own
    unit, row groups for example."""

    def ranges(self, file: AnyPath, whole: int, size: int) -> Iterator[tuple[int, int | None, int]]:
        """Yield (start, stop, bytes) of ranges of about `size` bytes of a file of `whole` bytes."""
        yield 0, None, whole

    def start_of(self, file: AnyPath, row: int) -> int:
        """Return the start of a range that contains a row."""
        return 0

    def read(self, file: AnyPath, start: int, stop: int | None, source: MayBeBad) -> Iterator[RowDocument]:
        """Yield every document of the rows of a range.

        `source` defines the documents of a row, and whether bad rows are left out.
        """
        column, hook = source.column, source.hook
        with _explained(file):
            for some in self._rows(file, column if hook is None else None, start, stop):
                values: Any = _records_of(some.batch) if hook else _values_of(some.batch, column, file)
                for row, value in enumerate(values, start=some.first):
                    with source.no_text_is_bad(f"{file}, row {row:,}"):
                        texts = map(whole_characters, hook(value, str(file))) if hook else [_text_of(value, column)]
                        for text in texts:
                            yield RowDocument(text, row, some.share)

    @abstractmethod
    def _rows(self, file: AnyPath, column: str | None, start: int, stop: int | None) -> Iterator[_Rows]:
        """Yield the rows of a range, with all columns if `column` is None."""


class ParquetReader(RowReader):
    """Reads parquet files; a range is consecutive row groups."""

    def ranges(self, file: AnyPath, whole: int, size: int) -> Iterator[tuple[int, int | None, int]]:
        """Yield consecutive row groups of about `size` of the file's `whole` bytes."""
        with _explained(file), _parquet(file) as opened:
            rows = _rows_of_groups(opened)
        sizes = [whole * count // max(sum(rows), 1) for count in rows]
        first, held = 0, 0
        for group, group_size in enumerate(sizes):
            if held and held + group_size > size:
                yield first, group, held
                first, held = group, 0
            held += group_size
        yield first, len(sizes), held

    def start_of(self, file: AnyPath, row: int) -> int:
        """Return the row group that contains a row, the last one for rows beyond it."""
        with _explained(file), _parquet(file) as opened:
            rows = _rows_of_groups(opened)
        return next((group for group, end in enumerate(accumulate(rows)) if row < end), max(len(rows) - 1, 0))

    def _rows(self, file: AnyPath, column: str | None, start: int, stop: int | None) -> Iterator[_Rows]:
        with _parquet(file) as opened:
            _check_column(file, column, opened.schema_arrow.names)
            counts = _rows_of_groups(opened)
            rows = max(sum(counts[start:stop]), 1)
            done = 0
            for group in range(len(counts))[start:stop]:
                step = rows_at_once(opened.metadata.row_group(group).total_byte_size, counts[group])
                for batch in opened.iter_batches(step, [group], column and [column], use_threads=False):
                    yield _Rows(sum(counts[:start]) + done, done / rows, batch)
                    done += batch.num_rows


class ArrowReader(RowReader):
    """Reads arrow files, memory-mapped, in one range."""

    def _rows(self, file: AnyPath, column: str | None, start: int, stop: int | None) -> Iterator[_Rows]:
        with _arrow_source(file) as source:
            row, size = 0, max(source.size(), 1)
            for batch in _record_batches(source):
                _check_column(file, column, batch.schema.names)
                step = rows_at_once(batch.nbytes, batch.num_rows)
                for first in range(0, batch.num_rows, step):
                    yield _Rows(row + first, source.tell() / size, batch.slice(first, step))
                row += batch.num_rows


ROW_READERS: dict[str, RowReader] = {".parquet": ParquetReader(), ".arrow": ArrowReader()}
"""Suffix of a file → the reader of its rows."""


def _records_of(batch: Any) -> list[dict[str, Any]]:
    """Return the rows as dictionaries."""
    batch.validate(full=True)
    return batch.to_pylist()


def _values_of(batch: Any, column: str, file: AnyPath) -> list[bytes | None]:
    """Return the values of the column as bytes."""
    import pyarrow as pa

    values = batch.column(column)
    if pa.types.is_dictionary(values.type):  # pandas' categories
        values.validate(full=True)
        values = values.dictionary_decode()
    kind = values.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise InputError(f"{file}: column '{column}' must hold text, found {kind}")
    values = values.view(pa.binary() if pa.types.is_string(kind) else pa.large_binary())
    values.validate(full=True)  # checks that texts are within the file: reading others would crash
    return values.to_pylist()


def _text_of(data: bytes | None, column: str) -> str:
    """Return the text of a value. Raises NoText if there is none, or it is not UTF-8."""
    if data is None:
        raise NoText(missing_column(column, {column: None}))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NoText(f"not UTF-8 (byte {error.start} of the text: {error.reason})") from None


def _arrow_source(file: AnyPath) -> Any:
    """Return a file for pyarrow, memory-mapped if it is local."""
    import pyarrow as pa

    if isinstance(file, RemotePath):
        return pa.PythonFile(file.open(), "r")
    return pa.memory_map(str(file))


def _record_batches(source: Any) -> Iterator[Any]:
    """Yield the record batches of a file in either of arrow's two formats; `datasets` writes streams."""
    from pyarrow import ipc

    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if is_file:
        reader = ipc.open_file(source)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from ipc.open_stream(source)


def _rows_of_groups(opened: Any) -> list[int]:
    """Return the number of rows in each row group."""
    return [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]


def rows_at_once(size: int, rows: int) -> int:
    """Return how many of `rows` rows, with `size` bytes in total, are read at a time."""
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * rows // max(size, 1)))


@contextmanager
def _parquet(file: AnyPath) -> Iterator[Any]:
    """Open the file as pyarrow's `ParquetFile`."""
    from pyarrow import parquet

    with file.open("rb") as stream, parquet.ParquetFile(stream, buffer_size=READ_BYTES, pre_buffer=False) as opened:
        yield opened


def _check_column(file: AnyPath, column: str | None, names: list[str]) -> None:
    if column is not None and column not in names:
        raise InputError(f"{file}: {missing_column(column, dict.fromkeys(names))}")


@contextmanager
def _explained(file: AnyPath) -> Iterator[None]:
    """Turn errors of pyarrow into an InputError of one line."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for names of columns
        raise InputError(f"{file}: damaged {file.suffix[1:]} file: {first_line(error)}") from None
