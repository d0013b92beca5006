"""How large the pages of a parquet column are, before one of them is decoded: a reader holds each as a whole.

    column chunk    header | dictionary | header | values | header | values …

A page's header is a struct of Thrift's compact protocol, of which three sizes are needed here, all integers:
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift (PageHeader).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any, NamedTuple

DICTIONARY = 2
TYPE, SIZE, COMPRESSED, DICTIONARY_HEADER = 1, 2, 3, 7
VALUES_HEADERS = (5, 8)
"""Of data pages of version 1 and 2. The first field of either, and of a dictionary's header, counts the values."""

DEEPEST = 8
"""Structs in structs."""


class Page(NamedTuple):
    """`size`: bytes, unpacked; `values`: how many, of a dictionary its entries."""

    is_dictionary: bool
    size: int
    values: int


def column_pages(file: IO[bytes], start: int, stop: int) -> Iterator[Page]:
    """The pages of a column chunk that lies in bytes `start` to `stop`.

    Errors (ValueError): there is no page header where one should be.
    """
    while start < stop:
        file.seek(start)
        header = _struct(file, 0)
        kind, size, compressed = (header.get(key, -1) for key in (TYPE, SIZE, COMPRESSED))
        counts: Any = next((header[key] for key in (DICTIONARY_HEADER, *VALUES_HEADERS) if key in header), {})
        values = counts.get(1, 0) if isinstance(counts, dict) else 0
        if not all(isinstance(each, int) and each >= 0 for each in (kind, size, compressed, values)):
            raise ValueError(f"no page header at byte {start:,}")
        yield Page(kind == DICTIONARY, size, values)
        start = file.tell() + compressed


def _struct(file: IO[bytes], depth: int) -> dict[int, Any]:
    if depth > DEEPEST:
        raise ValueError(f"no page header around byte {file.tell():,}")
    fields: dict[int, Any] = {}
    number = 0
    while head := _byte(file):
        step, kind = divmod(head, 16)
        number = number + step if step else _signed(file)
        fields[number] = _value(file, kind, depth)
    return fields


def _value(file: IO[bytes], kind: int, depth: int) -> Any:
    """Booleans, integers and structs; None for what is passed over."""
    if kind in (1, 2):
        return kind == 1
    if kind == 3:
        return _byte(file)
    if kind in (4, 5, 6):
        return _signed(file)
    if kind == 8:
        file.seek(_unsigned(file), 1)  # text: the smallest and the largest value, say
        return None
    if kind == 12:
        return _struct(file, depth + 1)
    raise ValueError(f"no page header around byte {file.tell():,}")  # it holds none of the other kinds


def _byte(file: IO[bytes]) -> int:
    found = file.read(1)
    if not found:
        raise ValueError(f"no page header at its end, byte {file.tell():,}")
    return found[0]


def _unsigned(file: IO[bytes]) -> int:
    value = shift = 0
    while shift < 70:
        byte = _byte(file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
        shift += 7
    raise ValueError(f"no page header around byte {file.tell():,}")


def _signed(file: IO[bytes]) -> int:
    value = _unsigned(file)
    return (value >> 1) ^ -(value & 1)
