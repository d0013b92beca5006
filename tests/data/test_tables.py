"""Parquet and arrow: texts of any length in pieces, pages that memory does not hold refused by row and size."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from kenotron.config.errors import InputError
from kenotron.data.parquet_pages import column_pages
from kenotron.data.prepare.inspect import Duplicates
from kenotron.data.prepare.shuffle import DocumentShuffle
from kenotron.data.tables import _bytes_of
from kenotron.data.texts import FileTexts, Piece

ROWS = ["short", "", "one line of é and 🙂\n" * 30, "x" * 333, "a\n\nb\r\n" * 40, "end"]


def write(path: Path, rows: list[str] | list[bytes]) -> FileTexts:
    kind = pa.binary() if isinstance(rows[0], bytes) else pa.large_string()
    table = pa.table({"text": pa.array(rows, kind)})
    if kind == pa.binary():
        table = pa.table({"text": table["text"].combine_chunks().view(pa.string())})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2, store_schema=False)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
    return FileTexts("rows", [path])


def whole(pieces: list[Piece]) -> list[str]:
    texts = [""]
    for piece in pieces:
        texts[-1] += piece.text
        if piece.last:
            texts.append("")
    assert texts.pop() == ""
    return texts


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_long_text_comes_in_pieces_and_a_stream_goes_on_after_any_of_them(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kenotron.data.texts.LONGEST_PIECE", 50)
    texts = write(tmp_path / f"rows{suffix}", ROWS)
    assert whole(list(texts.documents())) == ROWS
    pieces = list(texts.pieces_from(0, 0))
    assert whole(pieces) == ROWS
    assert len(pieces) > 15
    assert max(len(piece.text) for piece in pieces) < 150
    for number, piece in enumerate(pieces, start=1):
        assert list(texts.pieces_from(0, piece.done)) == pieces[number:]
    with pytest.raises(InputError, match=rf"rows\{suffix}: no text in it ends at place 12, which the state"):
        list(texts.pieces_from(0, 12))  # twelve pieces read, as states told once


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_wrong_byte_of_a_long_text_is_named_before_a_piece_of_it_is_read(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kenotron.data.texts.LONGEST_PIECE", 50)
    texts = write(tmp_path / f"rows{suffix}", [b"good", "é".encode() * 100 + b"\xff" + b"a" * 100])
    with pytest.raises(InputError, match=rf"rows\{suffix}, row 1: not UTF-8 \(byte 200 of the text"):
        list(texts.documents())
    texts.skip_bad = True
    assert [piece.text for piece in texts.documents()] == ["good"]
    assert texts.skipped == 1


def test_a_page_larger_than_memory_should_hold_is_one_line_or_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "1")
    rows = ["a", "b", "c", "d" * (5 << 20), "e", "f"]
    texts = write(tmp_path / "rows.parquet", rows)
    message = (
        r"rows\.parquet, row 2: a page of column 'text' holds 6 MiB.* at most 1 MiB: set KENOTRON_PARQUET_PAGE_MIB=6 "
        r"\(reading it takes up to 30 MiB\)"
    )
    with pytest.raises(InputError, match=message):
        list(texts.documents())
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "6")
    assert "".join(piece.text for piece in texts.documents()) == "".join(rows)
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "one")
    with pytest.raises(InputError, match="KENOTRON_PARQUET_PAGE_MIB: expected a number of MiB above 0, found 'one'"):
        list(texts.documents())
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "1")
    texts.skip_bad = True
    assert [piece.text for piece in texts.documents()] == ["a", "b", "e", "f"]
    assert texts.skipped == 1


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0", "compression": "zstd"}], ids=str
)
def test_pages_are_those_that_were_written(options):
    rows = [str(i) * (i % 50) for i in range(20_000)]
    file = io.BytesIO()
    parquet.write_table(pa.table({"text": rows}), file, data_page_size=5000, **options)
    chunk = parquet.ParquetFile(file).metadata.row_group(0).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    pages = list(column_pages(file, start, start + chunk.total_compressed_size))
    assert sum(page.values for page in pages if not page.is_dictionary) == len(rows)
    assert [page.is_dictionary for page in pages[:2]] == [options.get("use_dictionary", True), False]
    headers = chunk.total_uncompressed_size - sum(page.size for page in pages)
    assert 0 < headers < 300 * len(pages)  # with the smallest and the largest value
    with pytest.raises(ValueError, match="no page header"):
        list(column_pages(file, start + 2, start + chunk.total_compressed_size))


def test_a_document_longer_than_a_shuffle_holds_is_shuffled_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr("kenotron.data.prepare.shuffle.TOKENS_AT_ONCE", 10)
    random = np.random.default_rng(0)
    lengths = random.choice([1, 3, 40, 200], 60)
    ends, ids = np.cumsum(lengths), np.arange(lengths.sum())
    found: list[tuple[int, ...]] = []

    class Sink:
        def write(self, ids, lengths, loss=None):
            found.extend(tuple(part.tolist()) for part in np.split(ids, np.cumsum(lengths)[:-1]))

    with DocumentShuffle(tmp_path / "x", np.dtype("<u2"), len(ids), [0]) as mixed:
        for start in range(0, len(ids), 7):
            stop = min(start + 7, len(ids))
            mixed.append(ids[start:stop], ends[(ends > start) & (ends <= stop)] - start)
        mixed.give(Sink())
    expected = [tuple(part.tolist()) for part in np.split(ids, ends[:-1])]
    assert sorted(found) == expected != found


def test_copies_of_documents_longer_than_a_piece_are_found(monkeypatch):
    monkeypatch.setattr("kenotron.data.prepare.inspect.PIECE", 8)
    ids = np.arange(100) % 30
    counted = Duplicates()
    for start, stop in ((0, 25), (30, 55), (60, 85), (0, 24), (31, 56)):
        counted.add(ids, start, stop)
    assert counted.count() == 2


@given(st.lists(st.none() | st.binary(max_size=5), max_size=9), st.data())
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()], ids=str)
def test_values_of_a_slice_are_found_where_they_lie(kind, rows, data):
    first = data.draw(st.integers(0, len(rows)))
    last = data.draw(st.integers(first, len(rows)))
    found = _bytes_of(pa.array(rows, kind).slice(first, last - first))
    assert [None if each is None else each.to_pybytes() for each in found] == rows[first:last]
