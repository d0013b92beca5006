"""Damaged files: one clear line that names file and place, and never another exception, whatever the damage.

The litdata files are written here byte by byte, and Megatron's in `support.megatron_files`, from the published layouts.
"""

import json
import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kenotron.config.errors import InputError, nearest_sibling
from kenotron.data.formats import TokenFile, open_token_files
from kenotron.data.formats.datatrove import TokenWriter
from kenotron.data.formats.token_file import checked_loss, document_blocks, documents_between
from kenotron.prepare.merge import merge
from support.megatron_files import CODES, write_megatron

DOCS = [[1, 2, 3], [], [4, 5], [6, 7, 8, 9]]
IDS = [token for doc in DOCS for token in doc]
ENDS = [3, 3, 5, 9]


def write_datatrove(folder: Path) -> None:
    with TokenWriter(folder / "a.ds", np.dtype("uint16"), "gpt2") as writer:
        writer.write(np.array(IDS), np.array([len(d) for d in DOCS]), np.arange(9) % 2 == 0)


def write_litdata(folder: Path, **config: object) -> None:
    chunks = []
    for number, docs in enumerate((DOCS[:2], DOCS[2:])):
        ids = np.array([token for doc in docs for token in doc], "<i8")
        offsets = [4 * (len(docs) + 2) + 8 * sum(map(len, docs[:i])) for i in range(len(docs) + 1)]
        data, name = struct.pack(f"<I{len(offsets)}I", len(docs), *offsets) + ids.tobytes(), f"chunk-0-{number}.bin"
        (folder / name).write_bytes(data)
        chunks.append({"chunk_bytes": len(data), "chunk_size": len(docs), "dim": len(ids), "filename": name})
    config = {"compression": None, "data_format": ["no_header_tensor:17"], "item_loader": "TokensLoader"} | config
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config}))


def write_numpy(folder: Path) -> None:
    np.save(folder / "a.npy", np.array(IDS, "<u2"))


WRITERS = {
    "datatrove": write_datatrove,
    "megatron": lambda folder: write_megatron(folder / "a", DOCS),
    "litdata": write_litdata,
    "numpy": write_numpy,
}


def content(files: list[TokenFile]) -> tuple[list[int], list[int]]:
    """Everything that a reader of `files` touches."""
    ids, ends = list[int](), list[int]()
    for file in files:
        documents_between(file, 0, len(file.tokens))
        checked_loss(file, 0, len(file.tokens))
        for start, lengths in document_blocks(file, 4) if file.ends is not None else ():
            ends += (len(ids) + start + np.cumsum(lengths)).tolist()
        ids += file.tokens[:].tolist()
    return ids, ends


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("split", [False, True])
def test_megatron_by_its_layout_with_every_code(tmp_path: Path, dtype: str, split: bool) -> None:
    write_megatron(tmp_path / "a", DOCS, dtype, split)
    files = open_token_files(tmp_path, "PATH")
    assert files[0].tokens.dtype == np.dtype(dtype)
    assert content(files) == (IDS, ENDS)


def test_litdata_becomes_ds_in_the_order_of_its_index(tmp_path: Path) -> None:
    """Chunk 10 comes after chunk 2, whatever their names; ids of 8 bytes get 4."""
    (tmp_path / "in").mkdir()
    write_litdata(tmp_path / "in")
    index = json.loads((tmp_path / "in" / "index.json").read_text())
    for chunk, name in zip(index["chunks"], ("chunk-0-2.bin", "chunk-0-10.bin"), strict=True):
        (tmp_path / "in" / chunk["filename"]).rename(tmp_path / "in" / name)
        chunk["filename"] = name
    (tmp_path / "in" / "index.json").write_text(json.dumps(index))
    assert merge([str(tmp_path / "in")], tmp_path / "out")["dtype"] == "uint32"
    assert content(open_token_files(tmp_path / "out", "PATH")) == (IDS, ENDS)


def test_raw_ids_need_a_dtype(tmp_path: Path) -> None:
    for name in ("train.bin", "part.npy"):
        path = tmp_path / name
        np.array(IDS, "<u2").tofile(path)
        with pytest.raises(InputError, match=r"give their dtype \(token_dtype, or --dtype; "):
            open_token_files(path, "PATH")
        assert content(open_token_files(path, "PATH", "uint16")) == (IDS, [])
    with pytest.raises(InputError, match="--dtype: unknown dtype 'unit16'.*did you mean 'uint16'"):  # noqa: RUF043
        open_token_files(tmp_path, "--dtype", "unit16")


@pytest.mark.parametrize("name", ["a.ds", "a.bin", "a.npy"])
def test_halves_of_ids_are_not_taken_for_ids(tmp_path: Path, name: str) -> None:
    """Files that do not tell their width and are read with half of it, guessed or given."""
    np.arange(1, 41, dtype="<u4").tofile(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: every second id is 0 .* 2 bytes \(uint16\).* seems to have 4"):
        open_token_files(tmp_path, "PATH", None if name == "a.ds" else "uint16")
    assert open_token_files(tmp_path, "PATH", "uint32")[0].tokens.tolist() == list(range(1, 41))
    np.arange(1, 41, dtype="<i8").tofile(tmp_path / name)
    with pytest.raises(InputError, match="seems to have 8"):
        open_token_files(tmp_path, "PATH", "uint32")
    np.arange(1, 41, dtype="<u2").tofile(tmp_path / name)
    assert len(open_token_files(tmp_path, "PATH", "uint16")[0].tokens) == 40


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_ds_knows_its_width_by_metadata_or_index(tmp_path: Path, metadata: bool, dtype: str) -> None:
    with TokenWriter(tmp_path / "a.ds", np.dtype(dtype)) as writer:
        writer.write(np.array(IDS), np.array([len(d) for d in DOCS]))
    if not metadata:
        (tmp_path / "a.ds.metadata").unlink()
    files = open_token_files(tmp_path, "PATH")
    assert files[0].tokens.dtype == np.dtype(dtype)
    assert content(files) == (IDS, ENDS)
    if metadata:
        with pytest.raises(InputError, match=r"asked for, but .* bytes a token"):
            open_token_files(tmp_path, "PATH", "uint32" if dtype == "uint16" else "uint16")


def put(name: str, at: int, data: bytes):
    def damage(folder: Path) -> None:
        with open(folder / name, "r+b") as file:
            file.seek(at)
            file.write(data)

    return damage


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def u64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


DAMAGES = [
    ("datatrove", cut("a.ds", 17), r"a\.ds: truncated: 17 bytes .* begins at byte 16"),
    ("datatrove", cut("a.ds", 16), r"a\.ds: holds 8 tokens .*metadata says 9"),
    ("datatrove", put("a.ds.index", 24, u64(10)), r"a\.ds\.index: its last document ends at token 10 \(byte 24\)"),
    ("datatrove", put("a.ds.index", 0, u64(4)), r"a\.ds\.index: not sorted: document 1 \(byte 8\)"),
    ("datatrove", put("a.ds.metadata", 5, b"3"), r"metadata: line 1: expected .* 2 or 4"),
    ("datatrove", cut("a.ds.loss", 8), r"a\.ds\.loss: 8 bytes, expected one for each of the 9"),
    ("megatron", put("a.idx", 17, b"\7"), r"dtype code of .* at byte 17, found 7 \(float32, not integers\)"),
    ("megatron", put("a.idx", 18, u64(2**63)), r"a\.idx: expected \d+ bytes for \d+ sequences"),
    ("megatron", put("a.idx", 34, b"\4"), r"a\.idx: sequence 1 .* byte 12 of a\.bin; expected it at byte 16"),
    ("megatron", put("a.idx", 34 + 48, u64(1)), r"a\.idx: the starts of documents from byte 82 on"),
    ("megatron", cut("a.bin", 35), r"a\.bin: truncated: 35 bytes .* byte 32"),
    ("megatron", remove("a.bin"), r"a\.bin: no such file"),
    ("litdata", cut("chunk-0-1.bin", 60), r"chunk-0-1\.bin: its items are in .* ends at byte 60"),
    ("litdata", put("chunk-0-1.bin", 8, b"\1"), r"chunk-0-1\.bin: item 0 \(byte 4\)"),
    ("litdata", cut("index.json", 40), r"index\.json is not JSON"),
    ("numpy", cut("a.npy", 145), r"a\.npy: 9 ids .* end at byte 146, but the file ends at byte 145"),
]


@pytest.mark.parametrize(("format", "damage", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_damage_is_one_line_that_names_file_and_place(tmp_path: Path, format: str, damage, message: str) -> None:
    WRITERS[format](tmp_path)
    assert content(open_token_files(tmp_path, "PATH"))[0] == IDS
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        content(open_token_files(tmp_path, "PATH"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"compression": "zstd"}, r'compression \("zstd"\) is not read'),
        ({"encryption": {"level": "chunk"}}, "encryption .* is not read"),
        ({"data_format": ["no_header_tensor:2"]}, "expected one field of integers"),
    ],
)
def test_litdata_that_holds_other_things_is_refused_by_name(tmp_path: Path, config: dict, message: str) -> None:
    write_litdata(tmp_path, **config)
    with pytest.raises(InputError, match=message):
        open_token_files(tmp_path, "PATH")


def test_what_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data.dataset_folder: no token file in"):
        open_token_files(tmp_path, "data.dataset_folder")
    (tmp_path / "corpus").mkdir()
    with pytest.raises(InputError, match=r"no such file or folder: .*did you mean 'corpus'"):
        open_token_files(tmp_path / "corpsu", "PATH")
    write_datatrove(tmp_path)
    write_numpy(tmp_path / "corpus")
    with pytest.raises(InputError, match=r"several formats \(datatrove, numpy\)"):
        open_token_files(tmp_path, "PATH")


@pytest.mark.parametrize("format", WRITERS)
@given(data=st.data())
def test_no_damage_is_another_exception(format: str, data: st.DataObject) -> None:
    """A byte is changed, a file is cut, grown or removed: an InputError, or as many tokens as there were."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        WRITERS[format](folder)
        victim = data.draw(st.sampled_from(sorted(file.name for file in folder.iterdir())))
        raw = bytearray((folder / victim).read_bytes())
        kind = data.draw(st.sampled_from(["flip", "cut", "grow", "remove"]))
        at = data.draw(st.integers(0, len(raw) - 1))
        if kind == "flip":
            raw[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del raw[at:]
        elif kind == "grow":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        (folder / victim).write_bytes(raw)
        if kind == "remove":
            (folder / victim).unlink()
        try:
            ids, ends = content(open_token_files(folder, "PATH"))
        except InputError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return
        if format == "numpy" and victim == "a.npy":  # the header may say another type or order of bytes
            assert len(ids) * 2 <= len(raw)
            return
        assert len(ids) == len(IDS)
        assert not ends or ends[-1] == len(ids)
        if victim not in ("a.ds", "a.bin", "chunk-0-0.bin", "chunk-0-1.bin", "index.json", "a.idx"):
            assert ids == IDS


def test_the_prefix_of_megatrons_files_is_told_the_file_of_tokens(tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"web_text_document.{suffix}").touch()
    assert nearest_sibling(tmp_path / "web_text_document") == "; did you mean 'web_text_document.bin'?"
