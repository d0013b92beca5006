"""Parquet and arrow: texts of any length in chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from kenotron.config.errors import InputError
from kenotron.prepare.inspect import Duplicates
from kenotron.prepare.shuffle import DocumentShuffle
from kenotron.text.documents import DocumentChunk
from kenotron.text.file_documents import FileDocuments

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


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_wrong_byte_of_a_long_text_is_named_before_a_piece_of_it_is_read(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("kenotron.text.file_documents.LONGEST_CHUNK", 50)
    texts = write(tmp_path / f"rows{suffix}", [b"good", "é".encode() * 100 + b"\xff" + b"a" * 100])
    with pytest.raises(InputError, match=rf"rows\{suffix}, row 1: not UTF-8 \(byte 200 of the text"):
        list(texts.documents())
    texts.skip_bad = True
    assert [chunk.text for chunk in texts.documents()] == ["good"]
    assert texts.skipped == 1


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
