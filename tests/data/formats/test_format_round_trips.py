"""Random documents through every writer and reader, and through every pair of formats."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.errors import InputError
from kenotron.data.formats import documents_between, megatron, open_token_files, open_writer
from kenotron.data.formats.token_file import token_chunks
from kenotron.prepare import convert as converting
from kenotron.prepare.convert import convert
from kenotron.prepare.merge import merge

documents = st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=8)
WRITABLE = {
    "datatrove": ["uint16", "uint32"],
    "megatron": ["uint16", "int32", "int64"],
}


def flat(docs: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(list(chain(*docs)), dtype=np.int64), np.array([len(d) for d in docs], dtype=np.int64)


@pytest.mark.parametrize(("format", "dtype"), [(f, d) for f, dtypes in WRITABLE.items() for d in dtypes])
@given(batches=st.lists(documents, max_size=3))
def test_what_is_written_is_read(format: str, dtype: str, batches: list[list[list[int]]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "below" / "corpus"
        with open_writer(path, format, np.dtype(dtype), "a|b") as writer:
            for batch in batches:
                writer.write(*flat(batch))
        ids, lengths = flat(list(chain(*batches)))
        (file,) = open_token_files(folder, "PATH")
        assert file.format == format
        assert file.tokens.dtype == np.dtype(dtype)
        assert file.tokens.tolist() == ids.tolist()
        assert file.ends is not None
        assert file.ends.tolist() == np.cumsum(lengths).tolist()
        assert file.tokenizer == ("a|b" if format == "datatrove" else None)
        assert not list(Path(folder).rglob("*.partial"))


@given(batches=st.lists(st.tuples(documents, st.booleans()), max_size=4), seed=st.integers(0, 99))
def test_a_loss_mask_may_begin_late_and_pause(batches: list[tuple[list[list[int]], bool]], seed: int) -> None:
    random = np.random.default_rng(seed)
    expected: list[np.ndarray] = []
    with TemporaryDirectory() as folder:
        with open_writer(Path(folder) / "a.ds", "datatrove", np.dtype("uint16")) as writer:
            for batch, masked in batches:
                ids, lengths = flat(batch)
                loss = random.random(len(ids)) < 0.5 if masked else None
                writer.write(ids, lengths, loss)
                expected.append(np.ones(len(ids), bool) if loss is None else loss)
        (file,) = open_token_files(folder, "PATH")
        if any(masked for _, masked in batches):
            assert file.loss is not None
            assert file.loss.tolist() == np.concatenate(expected).tolist()
        else:
            assert file.loss is None


@pytest.mark.parametrize("to", WRITABLE)
@pytest.mark.parametrize("source", WRITABLE)
@given(docs=documents, piece=st.integers(1, 7))
def test_convert_keeps_ids_and_documents_at_any_piece_size(source: str, to: str, docs: list, piece: int) -> None:
    before = converting.CHUNK_TOKENS
    converting.CHUNK_TOKENS = piece
    try:
        with TemporaryDirectory() as folder:
            root = Path(folder)
            for name in ("a", "b/c"):
                with open_writer(root / "src" / name, source, np.dtype("uint16")) as writer:
                    writer.write(*flat(docs))
            convert(root / "src", root / "dst", to)
            first, second = open_token_files(root / "src", "A"), open_token_files(root / "dst", "B")
            assert [f.path.stem for f in first] == [f.path.stem for f in second]
            for one, other in zip(first, second, strict=True):
                assert other.tokens.dtype == one.tokens.dtype
                assert other.tokens.tolist() == one.tokens.tolist()
                assert other.ends is not None
                assert other.ends.tolist() == np.cumsum([len(d) for d in docs]).tolist()
    finally:
        converting.CHUNK_TOKENS = before


def test_there_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    with open_writer(tmp_path / "a.ds", "datatrove", np.dtype("uint32")) as writer:
        writer.write(*flat([[1, 70000], [], [3, 4, 5], []]))
    convert(tmp_path / "a.ds", tmp_path / "b.bin", "megatron")
    assert open_token_files(tmp_path / "b.bin", "")[0].tokens.dtype == np.dtype("int32")
    convert(tmp_path / "b.bin", tmp_path / "c.ds", "datatrove")
    for suffix in ("", ".index", ".metadata"):
        assert Path(f"{tmp_path}/c.ds{suffix}").read_bytes() == Path(f"{tmp_path}/a.ds{suffix}").read_bytes()


def test_convert_refuses_a_narrow_type_before_writing_anything(tmp_path: Path) -> None:
    for name, last in (("a", 5), ("b", 65536)):
        with open_writer(tmp_path / "src" / name, "datatrove", np.dtype("uint32")) as writer:
            writer.write(*flat([[1, 2], [last]]))
    with pytest.raises(InputError, match=r"b\.ds: token 2 is 65536, beyond uint16 \(largest 65535\)"):
        convert(tmp_path / "src", tmp_path / "dst", "megatron", dtype="uint16")
    assert not (tmp_path / "dst").exists()
    with pytest.raises(InputError, match=r"cannot write 'megatrom'.*did you mean 'megatron'"):
        convert(tmp_path / "src", tmp_path / "dst", "megatrom")
    convert(tmp_path / "src", tmp_path / "dst", "megatron")
    with pytest.raises(InputError, match=r"DST: .*dst already exists"):
        convert(tmp_path / "src", tmp_path / "dst", "megatron")


def test_convert_is_all_or_nothing_and_hands_the_manifest_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        with open_writer(tmp_path / "src" / name, "datatrove", np.dtype("uint16"), "tok") as writer:
            writer.write(*flat([[1, 2], [3]]))
    known = {"tokenizer": "tok", "tokenizer_hash": "1f", "vocab_size": 300, "eos": 3, "bos": None}
    (tmp_path / "src" / "manifest.json").write_text(json.dumps(known | {"bytes": 7}))
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr("kenotron.prepare.convert.write_json", Mock(side_effect=full))
        with pytest.raises(InputError, match=r"DST: cannot create .*dst: No space left"):
            convert(tmp_path / "src", tmp_path / "dst", "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]
    convert(tmp_path / "src", tmp_path / "dst", "megatron")
    assert known.items() <= json.loads((tmp_path / "dst" / "manifest.json").read_text()).items()
    convert(tmp_path / "src" / "a.ds", tmp_path / "a.bin", "megatron")
    assert known.items() <= json.loads((tmp_path / "a.bin.manifest.json").read_text()).items()


def test_a_loss_mask_is_never_dropped(tmp_path: Path) -> None:
    with open_writer(tmp_path / "a.ds", "datatrove", np.dtype("uint16")) as writer:
        writer.write(*flat([[1, 2, 3]]), np.array([True, False, True]))
    for target in ("b.bin", "deep/b"):
        with pytest.raises(InputError, match=r"a\.ds\.loss: megatron files cannot hold a loss mask"):
            convert(tmp_path / "a.ds", tmp_path / target, "megatron")
    with pytest.raises(InputError, match="cannot hold a loss mask"):
        merge([str(tmp_path / "a.ds")], tmp_path / "b.bin")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ds", "a.ds.index", "a.ds.loss", "a.ds.metadata"]
    convert(tmp_path / "a.ds", tmp_path / "c.ds", "datatrove")
    assert (tmp_path / "c.ds.loss").read_bytes() == b"\1\0\1"


@given(docs=documents, longest=st.integers(1, 5))
def test_a_document_longer_than_a_megatron_sequence_is_several(docs: list, longest: int) -> None:
    before = megatron.LONGEST_SEQUENCE
    megatron.LONGEST_SEQUENCE = longest
    try:
        with TemporaryDirectory() as folder:
            with open_writer(Path(folder) / "a", "megatron", np.dtype("uint16")) as writer:
                writer.write(*flat(docs))
            (file,) = open_token_files(folder, "PATH")
            sequences = int.from_bytes((Path(folder) / "a.idx").read_bytes()[18:26], "little")
    finally:
        megatron.LONGEST_SEQUENCE = before
    assert sequences == sum(max(1, -(-len(d) // longest)) for d in docs)
    assert file.ends is not None
    assert file.ends.tolist() == np.cumsum([len(d) for d in docs]).tolist()


@given(docs=documents, start=st.integers(0, 70), length=st.integers(0, 70), size=st.integers(1, 9))
def test_documents_between_and_pieces_by_a_plain_loop(docs: list, start: int, length: int, size: int) -> None:
    with TemporaryDirectory() as folder:
        with open_writer(Path(folder) / "a", "datatrove", np.dtype("uint16")) as writer:
            writer.write(*flat(docs))
        (file,) = open_token_files(folder, "PATH")
        ends = np.cumsum([len(d) for d in docs]).tolist()
        stop = start + length
        assert documents_between(file, start, stop).tolist() == [end for end in ends if start < end <= stop]
        seen = [(p.start + p.ends).tolist() for p in token_chunks(file, size) if p.ends is not None]
        assert list(chain(*seen)) == ends


@pytest.mark.parametrize("format", WRITABLE)
@pytest.mark.parametrize(("last", "message"), [(65536, "token 2 is 65536, beyond uint16"), (-1, "token 2 is negative")])
def test_an_error_in_the_block_leaves_nothing_behind(tmp_path: Path, format: str, last: int, message: str) -> None:
    def work() -> None:
        with open_writer(tmp_path / "a", format, np.dtype("uint16")) as writer:
            writer.write(*flat([[1, 2]]))
            writer.write(*flat([[last, 2]]))

    with pytest.raises(InputError, match=message):
        work()
    assert list(tmp_path.iterdir()) == []
