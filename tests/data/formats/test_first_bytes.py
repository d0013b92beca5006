"""What a file is, by its first bytes where its name does not say."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kenotron.config.errors import InputError
from kenotron.data.formats import open_token_files
from kenotron.data.formats.numpy import open_file
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.file_documents import FileDocuments, find_files
from kenotron.text.tokenizer import TextTokenizer

LINES = '{"text": "hello"}\n{"text": "bye"}\n'


def texts_of(path: Path) -> list[str]:
    return [chunk.text for chunk in FileDocuments("f", find_files(path, "test")).documents()]


@pytest.mark.parametrize("name", ["DATA.JSONL", "x.jsonlines", "y.Ndjson"])
def test_json_lines_under_any_spelling(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LINES)
    assert texts_of(tmp_path / name) == texts_of(tmp_path) == ["hello", "bye"]


@pytest.mark.parametrize("name", ["a.BIN", "a.Npy", "a.DS"])
def test_tokens_under_a_suffix_in_capitals_are_named(tmp_path: Path, name: str) -> None:
    np.arange(8, dtype="uint16").tofile(tmp_path / "b.bin")
    (tmp_path / name).write_bytes(b"1234")
    with pytest.raises(InputError, match=f"{name}: expected the suffix .* in lower case"):
        open_token_files(tmp_path, "test", "uint16")


@pytest.mark.parametrize("name", ["part-00000", "x.txt"])
def test_json_lines_under_another_name_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LINES)
    indented = "\n".join(json.dumps(json.loads(line), indent=2) for line in LINES.splitlines())
    for text in (LINES, LINES.splitlines()[0], indented, indented[: indented.index("}") + 1]):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="holds JSON objects, but is read as one text by its name"):
            texts_of(tmp_path / name)
    (tmp_path / name).write_text('{"other": 1}\n')
    assert texts_of(tmp_path / name) == ['{"other": 1}\n']


def test_packed_files_and_tables_under_another_name_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import feather, parquet

    table = pa.table({"text": ["hello"]})
    feather.write_feather(table, tmp_path / "rows.arrow", compression="uncompressed")
    parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "lines.gz").write_bytes(gzip.compress(LINES.encode()))
    (tmp_path / "lines.zst").write_bytes(pa.compress(LINES.encode(), "zstd", asbytes=True))
    for file in list(tmp_path.iterdir()):
        other = tmp_path / f"{file.stem}-00000.jsonl"
        file.rename(other)
        with pytest.raises(InputError, match=f"begins as a {file.suffix} file does; let its name end with"):
            texts_of(other)
        other.unlink()


def test_what_is_no_text_is_refused_under_a_texts_name(tmp_path: Path) -> None:
    import tarfile

    (tmp_path / "inner").write_text("words\n" * 2000)
    with tarfile.open(tmp_path / "a.txt", "w") as tar:
        tar.add(tmp_path / "inner", "inner")
    (tmp_path / "b.txt").write_bytes("two bytes a character".encode("utf-16-le"))
    (tmp_path / "c.txt").write_text(json.dumps([{"text": "a"}]))
    (tmp_path / "d.txt").write_text('{"content": "a"}\n{"content": "b"}\n')
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress(b"id,text\n0,a\n"))
    (tmp_path / "f.tar.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
    for name, line in (
        ("a.txt", "many NUL characters"),
        ("b.txt", "many NUL characters"),
        ("c.txt", "holds one JSON array"),
        ("d.txt", "holds JSON objects"),
        ("e.csv.gz", "a table or an archive is no text"),
        ("f.tar.gz", "a table or an archive is no text"),
    ):
        with pytest.raises(InputError, match=rf"{name}: .*{line}"):
            texts_of(tmp_path / name)
    (tmp_path / "g.txt").write_text("[a link](x)\n{braces} and\0one NUL\n")
    assert texts_of(tmp_path / "g.txt") == ["[a link](x)\n{braces} and\0one NUL\n"]


def test_a_null_and_an_array_are_named(tmp_path: Path) -> None:
    array = "a.jsonl:1: expected one JSON object a line, found a JSON array; `jq -c"
    for text, line in (
        ('{"text": null}', "must hold text, found null"),
        ("[\n{}]", array),
        ('[{"text": "a"}, {"text": "b"}]', array),
        ('{\n  "text": "a"\n}\n', "found objects over several lines; `jq -c .` writes"),
    ):
        (tmp_path / "a.jsonl").write_text(text)
        with pytest.raises(InputError, match=line):
            texts_of(tmp_path)
    (tmp_path / "a.jsonl").write_text(LINES, "utf-16")
    with pytest.raises(InputError, match="found UTF-16; `iconv -f UTF-16 -t UTF-8` converts it"):
        texts_of(tmp_path)
    (tmp_path / "a.jsonl").write_text('[{"text": "a"}, {"text": "b"}]')
    with pytest.raises(InputError, match=array):  # with most of its lines left out the rest would be trained on
        list(FileDocuments("f", find_files(tmp_path, "test"), skip_bad=True).documents())


def test_categories_of_pandas_are_texts(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.array(["a", None, "b", "a"]).dictionary_encode()
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    found = FileDocuments("f", find_files(tmp_path, "test"), skip_bad=True)
    assert [chunk.text for chunk in found.documents()] == ["a", "b", "a"]


# llm.c's dev/data/data_common.py, HEADERS_INFO: of GPT-2 and of Llama 3
@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_the_header_of_llm_c_is_read_past(tmp_path: Path, magic: int, version: int, dtype: type) -> None:
    header, ids = np.zeros(256, np.int32), np.arange(1000, dtype=dtype)
    header[:3] = magic, version, len(ids)
    path = tmp_path / "fw.bin"
    path.write_bytes(header.tobytes() + ids.tobytes())
    for given in (None, np.dtype(dtype)):
        (found,) = open_file(path, "here", given)
        assert np.array_equal(found.tokens, ids)
    with pytest.raises(InputError, match="int64 asked for, but"):
        open_file(path, "here", np.dtype(np.int64))
    path.write_bytes(header.tobytes() + ids[:-1].tobytes())
    with pytest.raises(InputError, match="header says 1000 ids"):
        open_file(path, "here", None)


@pytest.mark.parametrize(
    ("start", "line"),
    [
        ([20240520, 2], "llm.c's header in version 2; expected version 1"),
        ([20240522, 1], "an evaluation's examples, not of tokens"),
        ([3, 20, 44], "a chunk of litdata .3 items.; its index.json is missing"),
    ],
)
def test_raw_files_that_begin_as_another_format_are_refused(tmp_path: Path, start: list[int], line: str) -> None:
    path = tmp_path / "chunk-0-0.bin"
    path.write_bytes(np.array(start + [7] * 300, np.uint32).tobytes())
    with pytest.raises(InputError, match=line):
        open_file(path, "here", np.dtype(np.uint16))


def test_a_tokenizer_that_adds_or_drops_blanks_is_not_byte_level() -> None:
    from tokenizers import AddedToken, pre_tokenizers

    made = train_byte_level_bpe([json.dumps(LINES)] * 3, 300)
    assert made.is_byte_level
    plain, Sequence = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Sequence
    for before, kept in (
        (pre_tokenizers.ByteLevel(add_prefix_space=True), False),
        (Sequence([pre_tokenizers.WhitespaceSplit(), plain]), False),
        (Sequence([pre_tokenizers.Digits(), plain]), True),
    ):
        made.backend.pre_tokenizer = before  # type: ignore[assignment]
        assert TextTokenizer(made.backend, made.config).is_byte_level == kept
    made.backend.add_tokens([AddedToken("<x>", rstrip=True)])
    assert not TextTokenizer(made.backend, made.config).is_byte_level


def test_a_vocabulary_that_lacks_bytes_is_not_byte_level() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    assert not TextTokenizer(backend, {}).is_byte_level


def test_an_array_with_numpys_header_is_read_whatever_its_name_says(tmp_path: Path) -> None:
    """As raw ids its header would be 64 tokens."""
    ids = np.arange(5000, dtype=np.uint16)
    np.save(tmp_path / "a.npy", ids)
    (tmp_path / "a.npy").rename(tmp_path / "a.bin")
    (file,) = open_file(tmp_path / "a.bin", "here", np.dtype(np.uint16))
    assert np.array_equal(file.tokens, ids)
    with pytest.raises(InputError, match=r"here: uint32 asked for, but .*a\.bin says uint16"):
        open_file(tmp_path / "a.bin", "here", np.dtype(np.uint32))
