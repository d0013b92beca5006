"""Every reader of the data package under damage: what comes out is right, or is one line by InputError; nothing else.

A good file is made, a few of its bytes are changed, cut, doubled or set to the largest numbers, and it is read to its
end. Time and memory stay small whatever a header claims: a claim is held against the size of the file before it is
believed.
"""

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.errors import InputError
from kenotron.data import load_tokenizer, open_run
from kenotron.data.manifest import read_json
from kenotron.data.sources.token_files import TokenPath, open_folder, read_mix
from kenotron.prepare.merge import merge
from kenotron.text.chat_template import chat_template
from kenotron.text.encode import EncodeRules, encode_documents
from kenotron.text.file_documents import FileDocuments, find_files
from kenotron.text.hash_split import AssignedChunk
from support.damage import FUZZ, damages, harmless
from support.data_runs import run_config
from support.written_tokens import counting, write_ds

TEXTS = ["one two", "été 漢字 🙂", "", "three\nfour " * 20]


# ---- text --------------------------------------------------------------------------------------------------


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False).encode() + b"\n" for text in texts)


def write_text(folder: Path, name: str) -> None:
    if name.endswith((".parquet", ".arrow")):
        from pyarrow import Table, ipc, parquet

        table = Table.from_pydict({"text": TEXTS})
        if name.endswith(".parquet"):
            parquet.write_table(table, folder / name, row_group_size=2)
        else:
            with ipc.new_stream(folder / name, table.schema) as stream:
                stream.write_table(table, max_chunksize=2)
        return
    raw = lines_of(TEXTS) if "jsonl" in name else "\n\n".join(TEXTS).encode()
    pack = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix)
    (folder / name).write_bytes(pack(raw[:40]) + pack(raw[40:]) if pack else raw)


def zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.Codec("zstd").compress(content, asbytes=True)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
@FUZZ
@given(damage=damages(), skip_bad=st.booleans(), size=st.integers(1, 300))
def test_texts(name: str, damage: Callable, skip_bad: bool, size: int) -> None:
    """Spans of a damaged file give what the file as a whole gives, and all of it can be written as UTF-8."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_text(folder, name)
        (folder / name).write_bytes(damage((folder / name).read_bytes()))

        def read() -> tuple[list[str], list[str]]:
            texts = FileDocuments(name, find_files(folder, "INPUT"), skip_bad=skip_bad)
            whole = [piece.text for piece in texts.documents()]
            by_span = [piece.text for span in list(texts.byte_ranges(size)) for piece in texts.read(span)]
            return whole, by_span

        whole, by_span = harmless(read) or ([], [])
        assert whole == by_span
        for text in whole:
            text.encode()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_column_whose_name_is_no_text(tmp_path: Path, name: str) -> None:
    write_text(tmp_path, name)
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes().replace(b"text", b"te\xff\xff"))
    with pytest.raises(InputError, match=f"{name}: damaged"):
        list(FileDocuments("a", [tmp_path / name]).documents())


def test_metadata_of_a_column_that_pyarrow_throws_at(tmp_path: Path) -> None:
    """It throws where nothing catches it, and that ends the process: hence one of its own."""
    write_text(tmp_path, "a.parquet")
    raw = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(raw.replace(b"\x25\x02\x18\x04text", b"\x25\x00\x18\x04text"))  # required
    program = "import sys; from pathlib import Path; from kenotron.text.file_documents import FileDocuments\n"
    program += "list(FileDocuments('a', [Path(sys.argv[1])]).documents())"
    command = [sys.executable, "-c", program, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert re.search("InputError: .*a.parquet: damaged parquet file: Definition level histogram", done.stderr)


# ---- tokens ------------------------------------------------------------------------------------------------


@FUZZ
@given(damage=damages(), victim=st.sampled_from(["a.ds", "a.ds.index", "a.ds.loss", "a.ds.metadata"]))
def test_samples_documents_and_losses_of_token_files(damage: Callable, victim: str) -> None:
    """A token that is fed is below the vocabulary; what the damage did not touch is as it was."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_ds(folder / "a.ds", counting(0, [30, 1, 12, 40]), loss=[True, False] * 41 + [True])
        (folder / victim).write_bytes(damage((folder / victim).read_bytes()))

        def read() -> np.ndarray:
            opened = open_folder(TokenPath("dataset.tokens", str(folder)), 8, 83, 1)
            everything = np.arange(len(opened))
            samples = opened.read(everything)
            documents, loss = samples.document_ids, samples.loss_mask
            assert documents is None or (np.diff(documents, axis=1) >= 0).all()
            assert loss is None or set(np.unique(loss.view(np.uint8))) <= {0, 1}
            return samples.tokens

        found = harmless(read)
        if found is not None:
            assert found.min(initial=0) >= 0
            assert found.max(initial=0) < 83
            if victim != "a.ds" and found.dtype.itemsize == 2 and len(found):
                assert found.tolist() == [list(range(9 * i, 9 * i + 9)) for i in range(len(found))]


@FUZZ
@given(damage=damages(), shuffle=st.booleans(), victim=st.sampled_from(["a.ds", "a.ds.index", "a.ds.loss"]))
def test_merging(damage: Callable, shuffle: bool, victim: str) -> None:
    """What is merged in spite of the damage is whole: as many tokens as there were, or nothing is left behind."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_ds(folder / "in" / "a.ds", counting(0, [30, 1, 12, 40]), loss=[True, False] * 41 + [True])
        path = folder / "in" / victim
        path.write_bytes(damage(path.read_bytes()))
        made = harmless(lambda: merge([str(folder / "in")], folder / "out.ds", shuffle=shuffle, report=str))
        if made is None:
            assert [file.name for file in folder.iterdir()] == ["in"]
        else:
            size = (folder / "in" / "a.ds").stat().st_size
            assert (folder / "out.ds").stat().st_size == size == 2 * made["tokens"]


# ---- JSON --------------------------------------------------------------------------------------------------


@FUZZ
@given(damage=damages())
def test_mixes(damage: Callable) -> None:
    with TemporaryDirectory() as temporary:
        file = Path(temporary, "mix.json")
        file.write_bytes(damage(json.dumps({"code": 3, "prose.bin": 1.5, "more": 1e3}, indent=1).encode()))
        assert all(0 < weight < float("inf") for weight in (harmless(lambda: read_mix(file)) or {}).values())


DEEP = "[" * 100_000


@pytest.mark.parametrize("content", [DEEP, "1", "[]", "{}", '{"made_by": 1}'])
def test_a_manifest_without_what_it_is_read_for(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(InputError, match=r"manifest.json: damaged, remove it"):
        read_json(tmp_path / "manifest.json", made_by=dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@FUZZ
@given(content=JSON)
def test_any_json_as_mix_manifest_and_line(content: object) -> None:
    with TemporaryDirectory() as temporary:
        file = Path(temporary, "a.jsonl")
        file.write_text(json.dumps(content))
        harmless(lambda: read_mix(file))
        harmless(lambda: read_json(file))
        for column in ("text", *(content if isinstance(content, dict) else ())):
            harmless(lambda column=column: [piece.text for piece in FileDocuments("a", [file], column).documents()])


# ---- tokenizers --------------------------------------------------------------------------------------------


def test_tokenizers_that_cannot_tokenize(tmp_path: Path) -> None:
    words = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    words |= {"max_input_chars_per_word": 9}

    def opened(vocab: dict, config: str = "{}") -> list[int]:
        spec = {"version": "1.0", "added_tokens": [], "model": words | {"vocab": vocab}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        (tmp_path / "tokenizer_config.json").write_text(config)
        tokenizer = load_tokenizer(tmp_path)
        assert chat_template(tokenizer) is None
        return tokenizer.encode("a b")

    assert opened({"a": 0, "[UNK]": 1}) == [1]
    for vocab, config, why in [
        ({"a": 0}, "{}", "cannot encode a text: WordPiece error: Missing"),
        ({}, "{}", "tokenizer.json has no tokens"),
        ({"a": 0}, "[]", "tokenizer_config.json: expected a JSON object, found list"),
        ({"a": 0}, DEEP, "tokenizer_config.json is not JSON"),
        ({"a": 0}, '{"chat_template": {}}', "chat_template: expected text, found dict"),
    ]:
        with pytest.raises(InputError, match=why):
            opened(vocab, config)


def test_a_worker_whose_tokenizer_fails_tells_why() -> None:
    spec = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0}}}
    pieces = [AssignedChunk("b", 1, True, True, False)]
    for processes in (1, 2):
        with pytest.raises(InputError, match="tokenizer: cannot encode a text: WordLevel error"):
            list(encode_documents(pieces, json.dumps(spec), EncodeRules(0, None), processes))


# ---- what is cached ----------------------------------------------------------------------------------------


def test_a_damaged_cache_is_reported_or_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an entry of tokenized text any file is cut short or gone: the run reads the same tokens, or says so."""
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_bytes(lines_of([f"word {n} " * 20 for n in range(30)]))
    config = run_config({"text_files": str(tmp_path / "a.jsonl")})

    def tokens() -> list:
        with open_run(config, report=str) as data:
            return [batch.tokens.tolist() for batch in data.batch(1)]

    expected = tokens()
    entries = sorted(file for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.stat().st_size)
    assert len(entries) > 5
    for file in entries:
        for keep in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            whole = file.read_bytes()
            file.write_bytes(whole[:keep])
            found = harmless(tokens)
            assert found in (None, expected), file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(whole)
    assert tokens() == expected
