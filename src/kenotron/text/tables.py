"""Documents of parquet and arrow files, a few rows at a time.

    rows.parquet   row group 0 | row group 1 | …      a range is a run of row groups
    rows.arrow     batch, batch, …                    one range; memory-mapped

Only the text column is read, unless a hook wants whole rows. Values are decoded here, so that bytes that are no UTF-8
are found in the row that has them.
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
"""Rows that are in memory at a time: at most so many, and of about so many bytes."""

READ_BYTES = 1 << 20
"""Bytes that pyarrow reads of a column at once, where a page is not larger."""


class RowDocument(NamedTuple):
    """A document of a row, the number of its row in the file, and the share of the rows that were read before."""

    text: str
    row: int
    share: float


class _Rows(NamedTuple):
    """A few rows: the number of the first one, and the share of the rows done before it."""

    first: int
    share: float
    batch: Any


class RowReader(ABC):
    """Reads files of rows of one form. A range of rows goes from a start to a stop (None: the end), in the form's own
    unit, row groups for example."""

    def ranges(self, file: AnyPath, whole: int, size: int) -> Iterator[tuple[int, int | None, int]]:
        """A file of `whole` bytes in ranges of about `size` bytes: start, stop, bytes."""
        yield 0, None, whole

    def start_of(self, file: AnyPath, row: int) -> int:
        """The start of a range that holds a row."""
        return 0

    def read(self, file: AnyPath, start: int, stop: int | None, source: MayBeBad) -> Iterator[RowDocument]:
        """Every document of the rows of a range.

        `source` says what a document is of a row, and whether a row that is bad is left out.
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
        """The rows of a range, of all columns if `column` is None."""


class ParquetReader(RowReader):
    """Parquet files; a range is a run of row groups."""

    def ranges(self, file: AnyPath, whole: int, size: int) -> Iterator[tuple[int, int | None, int]]:
        """Runs of row groups of about `size` of the file's `whole` bytes."""
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
        """The row group that holds a row, the last one for rows beyond it."""
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
    """Arrow files, memory-mapped, in one range."""

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
"""What reads the rows of files, by their suffix."""


def _records_of(batch: Any) -> list[dict[str, Any]]:
    """The rows as dictionaries."""
    batch.validate(full=True)
    return batch.to_pylist()


def _values_of(batch: Any, column: str, file: AnyPath) -> list[bytes | None]:
    """The values of the column as bytes."""
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
    return values.to_pylist()


def _text_of(data: bytes | None, column: str) -> str:
    """The text of a value. Raises NoText: there is none, or it is not UTF-8."""
    if data is None:
        raise NoText(missing_column(column, {column: None}))
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NoText(f"not UTF-8 (byte {error.start} of the text: {error.reason})") from None


def _arrow_source(file: AnyPath) -> Any:
    """A file as pyarrow reads it, one of this machine memory-mapped."""
    import pyarrow as pa

    if isinstance(file, RemotePath):
        return pa.PythonFile(file.open(), "r")
    return pa.memory_map(str(file))


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


def _rows_of_groups(opened: Any) -> list[int]:
    """The number of rows in each row group."""
    return [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]


def rows_at_once(size: int, rows: int) -> int:
    """How many of so many rows of `size` bytes in all."""
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * rows // max(size, 1)))


@contextmanager
def _parquet(file: AnyPath) -> Iterator[Any]:
    """The file as pyarrow's `ParquetFile`."""
    from pyarrow import parquet

    with (
        file.open("rb") as stream,
        parquet.ParquetFile(stream, buffer_size=READ_BYTES, pre_buffer=False) as opened,
    ):
        yield opened


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
