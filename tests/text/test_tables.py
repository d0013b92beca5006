"""Parquet and arrow: texts of any length in chunks, pages that memory does not hold refused by row and size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from kenotron.config.errors import InputError
from kenotron.prepare.inspect import Duplicates
from kenotron.prepare.shuffle import DocumentShuffle
from kenotron.text.documents import DocumentChunk
from kenotron.text.file_documents import FileDocuments
from kenotron.text.tables import _bytes_of

ROWS = ["short", "", "one line of é and 🙂\n" * 30, "x" * 333, "a\n\nb\r\n" * 40, "end"]


def write(path: Path, rows: list[str] | list[bytes]) -> FileDocuments:
    kind = pa.binary() if isinstance(rows[0], bytes) else pa.large_string()
    table = pa.table({"text": pa.array(rows, kind)})
    if kind == pa.binary():
        table = pa.table({"text": table["text"].combine_chunks().view(pa.string())})
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=2, store_schema=False)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
    return FileDocuments("rows", [path])


def whole(chunks: list[DocumentChunk]) -> list[str]:
    texts = [""]
    for chunk in chunks:
        texts[-1] += chunk.text
        if chunk.last:
            texts.append("")
    assert texts.pop() == ""
    return texts


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_long_text_comes_in_pieces_and_a_stream_goes_on_after_any_of_them(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kenotron.text.file_documents.LONGEST_CHUNK", 50)
    texts = write(tmp_path / f"rows{suffix}", ROWS)
    assert whole(list(texts.documents())) == ROWS
    chunks = list(texts.chunks_from(0, 0))
    assert whole(chunks) == ROWS
    assert len(chunks) > 15
    assert max(len(chunk.text) for chunk in chunks) < 150
    for number, chunk in enumerate(chunks, start=1):
        assert list(texts.chunks_from(0, chunk.done)) == chunks[number:]
    with pytest.raises(InputError, match=rf"rows\{suffix}: no text in it ends at place 12, which the saved state"):
        list(texts.chunks_from(0, 12))  # twelve chunks read, as states told once


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_wrong_byte_of_a_long_text_is_named_before_a_piece_of_it_is_read(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kenotron.text.file_documents.LONGEST_CHUNK", 50)
    texts = write(tmp_path / f"rows{suffix}", [b"good", "é".encode() * 100 + b"\xff" + b"a" * 100])
    with pytest.raises(InputError, match=rf"rows\{suffix}, row 1: not UTF-8 \(byte 200 of the text"):
        list(texts.documents())
    texts.skip_bad = True
    assert [chunk.text for chunk in texts.documents()] == ["good"]
    assert texts.skipped == 1


def test_a_page_larger_than_memory_should_hold_is_one_line_or_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "1")
    rows = ["a", "b", "c", "d" * (5 << 20), "e", "f"]
    texts = write(tmp_path / "rows.parquet", rows)
    message = (
        r"rows\.parquet, row 2: a page of column 'text' holds about 6 MiB.* at most 1 MiB: "
        r"set KENOTRON_PARQUET_PAGE_MIB=6 \(reading it takes up to 30 MiB\)"
    )
    with pytest.raises(InputError, match=message):
        list(texts.documents())
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "6")
    assert "".join(chunk.text for chunk in texts.documents()) == "".join(rows)
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "one")
    with pytest.raises(InputError, match="KENOTRON_PARQUET_PAGE_MIB: expected a number of MiB above 0, found 'one'"):
        list(texts.documents())
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "1")
    texts.skip_bad = True
    assert [chunk.text for chunk in texts.documents()] == ["a", "b", "e", "f"]
    assert texts.skipped == 1


@pytest.mark.parametrize(
    "options", [{}, {"use_dictionary": False}, {"data_page_version": "2.0", "compression": "zstd"}], ids=str
)
def test_a_large_page_in_the_middle_of_a_column_is_refused_before_it_is_read(tmp_path, monkeypatch, options):
    """Pages of a few hundred kB, then one of 24 MB, by random text that hardly packs."""
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "16")
    random = np.random.default_rng(0)
    letters = random.integers(33, 126, 1 << 20, np.uint8).tobytes().decode()
    small = [f"{number} {letters[number : number + 10_000]}" for number in range(2000)]
    rows = [*small, *(letters[number:] + letters[:number] for number in range(24)), *small[:100]]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": rows}), path, data_page_size=1 << 18, write_batch_size=24, **options)
    assert parquet.ParquetFile(path).metadata.num_row_groups == 1
    texts = FileDocuments("rows", [path])
    found = []
    with pytest.raises(
        InputError, match=r"rows\.parquet, row [\d,]+: a page of column 'text' holds about (1[7-9]|2\d) MiB"
    ):
        found.extend(chunk.text for chunk in texts.documents())
    assert found == small[: len(found)]
    assert len(found) > 1000
    texts.skip_bad = True  # the rest of its row group is left out
    assert [chunk.text for chunk in texts.documents()] == found
    assert texts.skipped == 1
    monkeypatch.setenv("KENOTRON_PARQUET_PAGE_MIB", "32")
    assert "".join(chunk.text for chunk in texts.documents()) == "".join(rows)


def test_a_document_longer_than_a_shuffle_holds_is_shuffled_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr("kenotron.prepare.shuffle.TOKENS_AT_ONCE", 10)
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
    monkeypatch.setattr("kenotron.prepare.inspect.CHUNK_TOKENS", 8)
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
