"""Documents of files: what a document is, and what is said of files that cannot be read."""

import gzip
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from kenotron.config.errors import InputError
from kenotron.text.documents import DocumentChunk
from kenotron.text.file_documents import CHUNK_CHARACTERS, FileDocuments, find_files, python_stdlib


def read(texts):
    return [text for text, *_ in texts.documents()]


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", "line one\r\nline é\n\n".encode(), "line one\r\nline é\n\n"),
        ("byte-order mark.txt", b"\xef\xbb\xbfhello", "hello"),
        ("half a surrogate pair.jsonl", b'{"text": "a\\ud83d b"}\n', "a? b"),
    ],
)
def test_a_small_file_is_one_document(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    assert read(FileDocuments("a", [tmp_path / name])) == [text]


def test_a_long_file_is_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraph = "some words in a line\n" * 40 + "\n"
    file = tmp_path / "book.txt"
    file.write_text(paragraph * 400)
    chunks = read(FileDocuments("book", [file]))
    assert "".join(chunks) == paragraph * 400
    assert len(chunks) == 6
    assert all(chunk.startswith("some") and chunk.endswith("\n\n") for chunk in chunks)
    assert all(CHUNK_CHARACTERS <= len(chunk) < CHUNK_CHARACTERS + len(paragraph) for chunk in chunks[:-1])


def test_one_endless_line_is_cut_without_breaking_a_character(tmp_path):
    file = tmp_path / "line.txt"
    file.write_text("é漢" * 200_000)
    chunks = read(FileDocuments("line", [file]))
    assert len(chunks) > 2
    assert "".join(chunks) == "é漢" * 200_000


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


def test_jsonl_gives_the_text_column_also_packed(tmp_path):
    rows = [{"id": 1, "body": "first"}, {"id": 2, "body": "zweiter ß"}]
    lines = ("\n".join(map(json.dumps, rows)) + "\n\n").encode()
    middle = len(lines) // 2
    members = zstd(lines[:middle]) + zstd(lines[middle:])  # as `cat a.zst b.zst` and parallel packers leave them
    contents = {"a.jsonl": lines, "b.jsonl.gz": gzip.compress(lines), "c.jsonl.zst": members}
    files = [tmp_path / name for name in contents]
    for file in files:
        file.write_bytes(contents[file.name])
    assert read(FileDocuments("x", files, "body")) == ["first", "zweiter ß"] * 3


def test_a_text_packed_with_zstd_is_that_text(tmp_path):
    text = "".join(f"Line {number} of the façade.\n" * (number % 7) + "\n" for number in range(20_000))
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.md.zst").write_bytes(zstd(text.encode()))
    plain, packed = (read(FileDocuments("x", [file])) for file in find_files(tmp_path, "text_files"))
    assert packed == plain
    assert "".join(packed) == text


def test_folders_are_read_in_a_fixed_order_without_hidden_and_foreign_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b.jsonl.gz", ".hidden.txt", ".git/x.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [file.relative_to(tmp_path).as_posix() for file in find_files(tmp_path, "text_files")]
    assert found == ["a/b.jsonl.gz", "a/z.md", "b.txt"]


def test_linked_folders_are_read_once(tmp_path):
    """As those of token files, and as `data fetch` downloads them."""
    (tmp_path / "disk" / "part").mkdir(parents=True)
    (tmp_path / "disk" / "part" / "a.txt").write_text("x")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "part").symlink_to(tmp_path / "disk" / "part")
    (tmp_path / "corpus" / "part" / "loop").symlink_to(tmp_path / "corpus")
    found = find_files(tmp_path / "corpus", "text_files")
    assert [file.relative_to(tmp_path / "corpus").as_posix() for file in found] == ["part/a.txt"]


def test_a_file_packed_in_another_way_is_not_left_out_in_silence(tmp_path):
    for name in ("a.jsonl", "b.jsonl.xz"):
        (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match=r"text_files: .*b\.jsonl\.xz is compressed in a format that is not supported"):
        find_files(tmp_path, "text_files")
    (tmp_path / "b.jsonl.xz").rename(tmp_path / "pictures.zip")
    assert [file.name for file in find_files(tmp_path, "text_files")] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"body": "x"}\n',
            r"a\.jsonl:1: no text column 'text'; found body; text_column_name, or --column, ",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text"\n', r"a\.jsonl:2: expected one JSON object a line"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not UTF-8"),
        ("a.txt", b"good \xe9t\xe9", r"a\.txt: not UTF-8 \(byte 0xe9"),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-12], r"a\.txt\.gz: damaged gzip file"),
        ("a.jsonl.zst", zstd(b'{"text": "x"}\n' * 999)[:-3], r"a\.jsonl\.zst: damaged zstd file, near byte"),
        ("a.txt.zst", zstd(b"good \xe9t\xe9"), r"a\.txt\.zst: not UTF-8 \(byte 0xe9 at 5"),
    ],
)
def test_bad_content_is_named_in_one_line(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read(FileDocuments("x", [file]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_damage_is_placed_in_the_packed_file(tmp_path, name, packed):
    noise = random.Random(0)
    texts = [f"{noise.getrandbits(8000):x}" for _ in range(800)]
    lines = "".join((json.dumps({"text": each}) if name == "a.jsonl" else each) + "\n" for each in texts).encode()
    whole = gzip.compress(lines) if packed == "gz" else zstd(lines)
    for damage in (0, 200_000, len(whole) * 3 // 4):
        file = tmp_path / f"{name}.{packed}"
        file.write_bytes(whole[:damage] if damage else bytes(4) + whole[4:])
        with pytest.raises(InputError, match=r"damaged .* file, near byte [\d,]+: ") as caught:
            read(FileDocuments("x", [file]))
        place = int(str(caught.value).split("near byte ")[1].split(":")[0].replace(",", ""))
        assert damage <= place <= damage + (1 << 17)


def test_missing_and_empty_places_are_named(tmp_path):
    with pytest.raises(InputError, match=r"dataset\.text_files: no such file or folder: .*nowhere"):
        find_files(tmp_path / "nowhere", "dataset.text_files")
    with pytest.raises(InputError, match="holds no text file"):
        find_files(tmp_path, "dataset.text_files")
    (tmp_path / "a.tar").write_text("")
    with pytest.raises(InputError, match="holds no text file"):
        find_files(tmp_path, "dataset.text_files")
    with pytest.raises(InputError, match=r"expected text, .* found .*a\.tar; unpack it first"):
        find_files(tmp_path / "a.tar", "dataset.text_files")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_and_a_folder_without_permission_are_named(tmp_path):
    file = tmp_path / "secret.txt"
    file.write_text("x")
    file.chmod(0)
    with pytest.raises(InputError, match=r"secret\.txt: cannot read: Permission denied"):
        read(FileDocuments("x", [file]))
    (tmp_path / "secret").mkdir(mode=0)
    with pytest.raises(InputError, match="secret: cannot read: Permission denied"):
        find_files(tmp_path, "text_files")


def test_files_that_are_no_utf8_are_left_out_and_counted_where_the_user_did_not_choose_them(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x = 1\n")
    (tmp_path / "b.py").write_bytes(b"# \xff\n")
    texts = FileDocuments("x", find_files(tmp_path, "k"), chunk=None, skip_bad=True)
    assert read(texts) == ["x = 1\n"]
    assert texts.skipped == 1


def test_signature_and_content_hash_follow_the_content(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    assert FileDocuments("x", [file]).signature() is None  # too young to trust its time
    os.utime(file, (1_000_000, 1_000_000))
    before = FileDocuments("x", [file])
    signature, content = before.signature(), before.content_hash()
    os.utime(file, (2_000_000, 2_000_000))
    touched = FileDocuments("x", [file])
    assert touched.signature() != signature
    assert touched.content_hash() == content
    file.write_text("two")
    assert FileDocuments("x", [file]).content_hash() != content
    assert FileDocuments("x", [file], column="body").content_hash() != touched.content_hash()


def test_the_embedded_corpus_is_the_library_without_packages_and_tests():
    corpus = python_stdlib()
    names = {file.name for file in corpus.files}
    assert {"argparse.py", "decoder.py", "pathlib.py"} <= names
    assert not any(part in {"site-packages", "test", "tests"} for file in corpus.files for part in file.parts)
    assert 5_000_000 < corpus.size < 40_000_000
    assert corpus.files == python_stdlib().files
    first, done, last = next(corpus.documents())
    assert last
    assert len(first.encode()) == done


def test_a_long_row_comes_in_pieces_that_are_one_document(tmp_path, monkeypatch):
    """So encoding it takes bounded memory. Tables are below."""
    monkeypatch.setattr("kenotron.text.file_documents.LONGEST_CHUNK", 50)
    long = "".join(f"line {n}, é\n" + "\n" * (n % 4 == 0) for n in range(40))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": long}) + "\n" + json.dumps({"text": "short"}) + "\n")
    *chunks, short = FileDocuments("a", [tmp_path / "a.jsonl"]).documents()
    assert ("".join(chunk.text for chunk in chunks), short.text) == (long, "short")
    assert [chunk.last for chunk in (*chunks, short)] == [False] * (len(chunks) - 1) + [True, True]
    assert len(chunks) > 3
    assert max(len(chunk.text) for chunk in chunks) <= 100


def test_an_arrow_file_whose_texts_lie_outside_of_it_is_reported(tmp_path):
    """Reading them would end the process."""
    import numpy as np
    from pyarrow import Table, ipc

    table = Table.from_pydict({"text": ["one", "two", "three"] * 100})
    with ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    raw = (tmp_path / "a.arrow").read_bytes()
    last = np.array([1095, 1100], "<i4").tobytes()  # the last ends of texts
    assert raw.count(last) == 1
    (tmp_path / "a.arrow").write_bytes(raw.replace(last, np.array([1095, 2**31 - 1], "<i4").tobytes()))
    with pytest.raises(InputError, match=r"a\.arrow: damaged arrow file: .*offset"):
        list(FileDocuments("a", [tmp_path / "a.arrow"]).documents())


# ---- parquet and arrow: texts of any length in chunks ------------------------------------------------------

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
