"""Every reader of the data room under damage: what comes out is right, or one line by InputError; never anything else.

A good file is made, a few of its bytes are changed, cut, doubled or set to the largest numbers, and it is read to its
end. Time and memory stay small whatever a header claims: a claim is held against the size of the file before it is
believed.
"""

from __future__ import annotations

import gzip
import json
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from data_runs import run_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written_tokens import counting, write_ds

from kenotron.config.errors import InputError
from kenotron.data import open_run
from kenotron.data.prepare.manifest import read_json
from kenotron.data.prepare.merge import merge
from kenotron.data.texts import FileTexts, find_files
from kenotron.data.token_folder import open_folder
from kenotron.data.token_paths import TokenPath, read_mix

FUZZ = settings(max_examples=40, suppress_health_check=list(HealthCheck))
MOST_MEMORY = 64 << 20

TEXTS = ["one two", "été 漢字 🙂", "", "three\nfour " * 20]


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What happens to a file: some of its bytes are other ones, gone, there twice, or the largest number."""
    kind = draw(st.sampled_from(["flip", "cut", "grow", "double", "huge", "drop"]))
    place, more = draw(st.floats(0, 1, exclude_max=True)), draw(st.binary(min_size=1, max_size=9))
    huge = draw(st.sampled_from([b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\xff" * 4, b"\xff\xff\xff\x7f", b"\0" * 8]))

    def damage(raw: bytes) -> bytes:
        at = int(place * len(raw))
        if kind == "flip":
            return raw[:at] + bytes(byte ^ 0x55 for byte in raw[at : at + len(more)]) + raw[at + len(more) :]
        if kind == "cut":
            return raw[:at]
        if kind == "drop":
            return raw[:at] + raw[at + len(more) :]
        if kind == "huge":
            return raw[:at] + huge + raw[at + len(huge) :]
        return raw[:at] + (more if kind == "grow" else raw[at:]) + raw[at:]

    return damage


def harmless(read: Callable[[], object]) -> object | None:
    """What `read` gives, or None where it says in one line what is wrong; in little memory either way."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read()
    except InputError as error:
        assert str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MOST_MEMORY


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
            texts = FileTexts(name, find_files(folder, "INPUT"), skip_bad=skip_bad)
            whole = [piece.text for piece in texts.documents()]
            by_span = [piece.text for span in list(texts.spans(size)) for piece in texts.read(span)]
            return whole, by_span

        found = harmless(read)
        if found is not None:
            whole, by_span = found
            assert whole == by_span
            for text in whole:
                text.encode()


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
            documents, loss = opened.documents(everything), opened.loss(everything)
            assert documents is None or (np.diff(documents, axis=1) >= 0).all()
            assert loss is None or set(np.unique(loss.view(np.uint8))) <= {0, 1}
            return opened.samples(everything)

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
        mix = harmless(lambda: read_mix(file))
        if mix is not None:
            assert all(0 < weight < float("inf") for weight in mix.values())


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
            harmless(lambda column=column: [piece.text for piece in FileTexts("a", [file], column).documents()])


@FUZZ
@given(damage=damages())
def test_manifests(damage: Callable) -> None:
    with TemporaryDirectory() as temporary:
        file = Path(temporary, "manifest.json")
        file.write_bytes(damage(json.dumps({"made_by": {"inputs": ["a"]}, "files": []}).encode()))
        found = harmless(lambda: read_json(file))
        assert found is None or isinstance(found, dict)


# ---- what is cached ----------------------------------------------------------------------------------------


def test_a_damaged_cache_is_told_or_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
