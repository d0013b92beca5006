"""Whatever happens to a checkpoint's bytes is found, named, and nothing of it is loaded or executed."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kenotron.checkpoint.folders import newest_complete, resolve, verify
from kenotron.checkpoint.loading import load
from kenotron.checkpoint.manifest import Manifest, read_manifest, render
from kenotron.checkpoint.reading import read_tensors
from kenotron.config.errors import CheckpointError
from support.checkpoint_states import empty_like, forge, load_and_compare, moments, save_step, weights


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    save_step(folder, 10)
    save_step(folder, 20)
    return folder


FILES = [
    *("manifest.json", "config.yaml", "model_config.json", "model/index.json", "model/rank0.safetensors"),
    *("optimizer/index.json", "optimizer/rank0.safetensors", "tokenizer/tokenizer.json"),
]


def assert_found_and_skipped(root: Path, name: str) -> None:
    file = root / "20" / name
    problems = verify(root / "20")
    assert len(problems) == 1
    assert str(file) in problems[0] or name == "manifest.json"
    lines: list[str] = []
    assert newest_complete(root, lines.append) == root / "10"
    assert lines == [f"skipping checkpoint 20: {problems[0]}"]
    if name.startswith(("model/", "optimizer/", "manifest")):
        model, optimizer = empty_like(weights(0)), empty_like(moments(0))
        with pytest.raises(CheckpointError) as error:
            load(root / "20", model=model, optimizer=optimizer)
        assert str(error.value) == problems[0]
        assert all(torch.all(tensor == 7) for tensor in model.values()), "a damaged checkpoint was loaded"
    if name.startswith(("model/", "manifest")):
        with pytest.raises(CheckpointError, match=r"damaged|missing|no manifest|Is a directory"):
            read_tensors(root / "20")


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@example("model/rank0.safetensors", 0.0, 1)
@example("model/rank0.safetensors", 0.999999, 128)
def test_one_changed_byte_anywhere_is_found_and_named(root: Path, name: str, place: float, change: int) -> None:
    file = root / "20" / name
    original = file.read_bytes()
    damaged = bytearray(original)
    damaged[int(place * len(damaged))] ^= change
    file.write_bytes(damaged)
    try:
        assert_found_and_skipped(root, name)
    finally:
        file.write_bytes(original)
    assert verify(root / "20") == []


def test_every_byte_of_the_manifest_is_guarded(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "20", tmp_path / "20")
    file = tmp_path / "20" / "manifest.json"
    original = file.read_bytes()
    for place in range(len(original)):
        damaged = bytearray(original)
        # In turn: another digit or letter, another case or kind of white space, not ASCII any more.
        damaged[place] ^= (1, 32, 128)[place % 3]
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is damaged"):
            read_manifest(tmp_path / "20")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "emptied", "longer", "removed", "a folder"])
def test_a_file_that_was_cut_or_removed_is_found_and_named(root: Path, name: str, how: str) -> None:
    file = root / "20" / name
    original = file.read_bytes()
    file.unlink()
    if how == "a folder":
        file.mkdir()
    elif how != "removed":
        file.write_bytes({"cut": original[:-1], "emptied": b"", "longer": original + b"\0"}[how])
    try:
        assert_found_and_skipped(root, name)
    finally:
        file.rmdir() if how == "a folder" else file.unlink(missing_ok=True)
        file.write_bytes(original)


def test_a_file_that_is_cut_after_it_was_checked_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = save_step(tmp_path, 10).path
    for size in (0, 3000):
        os.truncate(path / "model" / "rank0.safetensors", size)
        with pytest.raises(
            CheckpointError, match=r"rank0.safetensors is damaged: it (is empty|was truncated to 3000 bytes)"
        ):
            load(path, model=empty_like(weights(0)), optimizer=None, verify=False)
        with pytest.raises(CheckpointError, match=r"rank0.safetensors is damaged"):
            read_tensors(path, verify=False)


def test_several_damaged_checkpoints_are_each_named_in_one_line(root: Path, tmp_path: Path) -> None:
    for step in (5, 10, 20, 30, 40):
        save_step(tmp_path, step)
    for step in (5, 40):  # 5 is older than the one that is found
        (tmp_path / str(step) / "manifest.json").unlink()
    (tmp_path / "30" / "model" / "rank0.safetensors").unlink()
    os.truncate(tmp_path / "20" / "config.yaml", 3)
    lines: list[str] = []
    assert newest_complete(tmp_path, lines.append) == tmp_path / "10"
    assert [line.split(":")[0] for line in lines] == [f"skipping checkpoint {step}" for step in (40, 30, 20)]
    assert "has no manifest.json" in lines[0]
    assert "rank0.safetensors is missing" in lines[1]
    with pytest.raises(CheckpointError, match=r"latest.txt names '40', .*no manifest.json; it has 10$"):
        resolve(tmp_path)
    shutil.rmtree(tmp_path / "10")
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "nothing") is None


def test_a_damaged_checkpoint_is_saved_anew(tmp_path: Path) -> None:
    """The run goes back to step 10, and comes by step 20 again."""
    save_step(tmp_path, 10)
    for name in ("manifest.json", "model/rank0.safetensors"):
        save_step(tmp_path, 20, seed=1)
        os.truncate(tmp_path / "20" / name, 5)
        assert newest_complete(tmp_path) == tmp_path / "10"
        save_step(tmp_path, 20, seed=2)
        assert newest_complete(tmp_path) == tmp_path / "20"
        assert load_and_compare(tmp_path / "20") == 2
    assert {path.name for path in tmp_path.iterdir()} - {"10", "20", "latest.txt"} == {".lock"}


class Executes:
    """Unpickling this leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.trace),)


def test_no_pickle_is_ever_executed(tmp_path: Path) -> None:
    path = save_step(tmp_path, 10).path
    bomb = pickle.dumps(Executes(tmp_path / "executed"))
    (path / "model" / ".metadata").write_bytes(bomb)  # where DCP's own reader would look
    assert load_and_compare(path) == 10
    for name in ("model/index.json", "optimizer/index.json"):
        original = (path / name).read_bytes()
        forge(path, name, bomb)
        with pytest.raises(CheckpointError, match=rf"{name} is not a valid index"):
            load(path, model=empty_like(weights(0)), optimizer=empty_like(moments(0)))
        forge(path, name, original)
    forge(path, "model/rank0.safetensors", bomb)
    with pytest.raises(CheckpointError, match="reaches beyond the end"):
        load(path, model=empty_like(weights(0)), optimizer=None)
    (path / "manifest.json").write_bytes(bomb)
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(path)
    assert not (tmp_path / "executed").exists()


def set_in(*keys: str | int, to: object):
    def change(index: dict) -> None:
        for key in keys[:-1]:
            index = index[key]
        index[keys[-1]] = to

    return change


NORM = ("tensors", "model.norm.weight")
CHUNK = (*NORM, "chunks", 0)


@pytest.mark.parametrize(
    "change",
    [
        *(set_in("format", to="other"), set_in("version", to=99), set_in("tensors", to=[])),
        *(set_in(*NORM, "dtype", to="F33"), set_in(*NORM, "shape", to=[33]), set_in(*NORM, "shape", to=[32, 1])),
        *(set_in(*NORM, "shape", to="ab"), set_in(*NORM, "chunks", to=[]), set_in(*CHUNK, "file", to="../../secret")),
        *(set_in(*CHUNK, "file", to="/etc/hostname"), set_in(*CHUNK, "file", to="rank1.safetensors")),
        *(set_in(*CHUNK, "begin", to=-8), set_in(*CHUNK, "begin", to=2), set_in(*CHUNK, "begin", to=10**9)),
        *(set_in(*CHUNK, "begin", to=None), set_in(*CHUNK, "offset", to=[-1]), set_in(*CHUNK, "offset", to=[1])),
        *(set_in(*CHUNK, "shape", to=[31]), set_in(*CHUNK, "shape", to=[-32]), set_in(*CHUNK, "shape", to=["x"])),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, change) -> None:
    path = save_step(tmp_path, 10).path
    (tmp_path / "secret").write_bytes(b"x" * 1000)
    index = json.loads((path / "model" / "index.json").read_bytes())
    change(index)
    forge(path, "model/index.json", json.dumps(index).encode())
    assert verify(path) == []  # the checksums fit: that is the point
    with pytest.raises(CheckpointError, match=r"model/index.json is not a valid index of tensors"):
        load(path, model=empty_like(weights(0)), optimizer=None)
    with pytest.raises(CheckpointError, match="is not a valid index"):
        read_tensors(path)


def test_a_manifest_that_lies_is_refused(tmp_path: Path) -> None:
    path = save_step(tmp_path, 10).path
    manifest = read_manifest(path)
    for name in ("../outside", "/etc/hostname", "model/../../x"):
        files = manifest.files | {name: manifest.files["config.yaml"]}
        (path / "manifest.json").write_bytes(render(Manifest(10, 1.0, {}, files)))
        with pytest.raises(CheckpointError, match="names a file outside its folder"):
            read_manifest(path)


def test_a_manifest_of_a_newer_version_says_to_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("kenotron.checkpoint.manifest.VERSION", 2)
        path = save_step(tmp_path, 10).path
    with pytest.raises(CheckpointError, match="has version 2; this kenotron reads up to 1: update it"):
        read_manifest(path)
