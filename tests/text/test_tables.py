"""Parquet and arrow: texts of any length in chunks."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from kenotron.config.errors import InputError
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
    monkeypatch.setattr("kenotron.text.tables.rows_at_once", lambda *_: 1)
    texts = write(tmp_path / f"rows{suffix}", [b"good"] * 6 + ["é".encode() * 100 + b"\xff" + b"a" * 100])
    with pytest.raises(InputError, match=rf"rows\{suffix}, row 6: not UTF-8 \(byte 200 of the text"):
        list(texts.documents())
    texts.skip_bad = True
    assert [chunk.text for chunk in texts.documents()] == ["good"] * 6
    assert texts.skipped == 1
