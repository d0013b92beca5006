"""Configs, checkpoints and Hugging Face models under damage: read right, or an error in one line; nothing else.

A few bytes change anywhere; or, in JSON whose checksum would find that, any value becomes any other one and the
checksum is made to fit. `make fuzz` tries a million such files, together with tests/data/test_fuzz_readers.py.
"""

import copy
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kenotron.checkpoint.folders import verify
from kenotron.checkpoint.manifest import MANIFEST, _seal
from kenotron.checkpoint.reading import read_tensors
from kenotron.config import InputError, load
from kenotron.interop.sources import open_source
from support.checkpoint_states import forge
from support.damage import CANARIES, FUZZ, damages, harmless
from support.tiny_llamas import hf_llama, our_model, save_ours
from support.tiny_run import REPOSITORY

EXAMPLES = sorted(
    str(path.relative_to(REPOSITORY))
    for path in REPOSITORY.glob("examples/**/*.yaml")
    if "\nmodel:" in path.read_text()  # others are a recipe's sections, or files of Kubernetes or lm_eval
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def edits(draw: st.DrawFn) -> Callable[[Any], Any]:
    """Somewhere in a tree of JSON another value: at a path that the tree itself decides."""
    turns, value = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=7)), draw(json_values)

    def edit(tree: Any) -> Any:
        here = tree
        for number, turn in enumerate(turns):
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            if not keys:
                return tree
            key = keys[turn % len(keys)]
            if number == len(turns) - 1 or not isinstance(here[key], dict | list):
                here[key] = value
                return tree
            here = here[key]
        return tree

    return edit


@cache
def content_of(name: str) -> Any:
    return yaml.safe_load((REPOSITORY / name).read_text())


@FUZZ
@given(name=st.sampled_from(EXAMPLES), damage=damages())
def test_bytes_of_a_config(name: str, damage: Callable[[bytes], bytes], scratch: Path) -> None:
    (scratch / "some.yaml").write_bytes(damage((REPOSITORY / name).read_bytes()))
    harmless(lambda: load(scratch / "some.yaml", report=lambda line: None), lines=True)


@FUZZ
@given(name=st.sampled_from(EXAMPLES), edit=edits())
def test_values_of_a_config(name: str, edit: Callable[[Any], Any]) -> None:
    content = edit(copy.deepcopy(content_of(name)))
    harmless(lambda: load(content, report=lambda line: None), lines=True)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny model, of this library."""
    folder = tmp_path_factory.mktemp("saved")
    return save_ours(our_model(folder), folder / "checkpoints")


@pytest.fixture
def again(saved: Path, scratch: Path) -> Iterator[Path]:
    """A copy of it whose files a test replaces and puts back."""
    copy = scratch / "checkpoint"
    shutil.copytree(saved, copy, dirs_exist_ok=True)
    yield copy
    shutil.rmtree(copy)


@FUZZ
@given(victim=st.integers(0, 10), damage=damages())
def test_bytes_of_a_checkpoint(victim: int, damage: Callable[[bytes], bytes], again: Path, saved: Path) -> None:
    files = sorted(path for path in again.rglob("*") if path.is_file())
    file = files[victim % len(files)]
    whole = file.read_bytes()
    damaged = damage(whole)
    file.write_bytes(damaged)
    try:
        if damaged != whole:
            assert verify(again), f"damage to {file.name} was not found"
        harmless(lambda: open_source(again))
    finally:
        file.write_bytes(whole)


@FUZZ
@given(edit=edits())
def test_values_of_an_index_with_checksums_that_fit(edit: Callable[[Any], Any], again: Path) -> None:
    index, manifest = again / "model" / "index.json", again / MANIFEST
    whole, sealed = index.read_bytes(), manifest.read_bytes()
    forge(again, "model/index.json", json.dumps(edit(json.loads(whole))).encode())
    try:
        harmless(lambda: read_tensors(again))
    finally:
        index.write_bytes(whole)
        manifest.write_bytes(sealed)


@FUZZ
@given(edit=edits())
def test_values_of_a_manifest_whose_seal_fits(edit: Callable[[Any], Any], again: Path) -> None:
    manifest = again / MANIFEST
    sealed = manifest.read_bytes()
    content = edit({key: value for key, value in json.loads(sealed).items() if key != "xxh3"})
    manifest.write_bytes(_seal(content))
    try:
        harmless(lambda: open_source(again))
        assert isinstance(verify(again), list)
    finally:
        manifest.write_bytes(sealed)


@pytest.fixture(scope="module")
def hugging_face(scratch: Path) -> Path:
    folder = scratch / "hf"
    hf_llama().save_pretrained(folder, max_shard_size="40KB")
    return folder


@FUZZ
@given(victim=st.integers(0, 10), damage=damages())
def test_bytes_of_a_hugging_face_model(victim: int, damage: Callable[[bytes], bytes], hugging_face: Path) -> None:
    files = sorted(path for path in hugging_face.rglob("*") if path.is_file())
    file = files[victim % len(files)]
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    try:
        harmless(lambda: read_all(hugging_face))
    finally:
        file.write_bytes(whole)


@FUZZ
@given(name=st.sampled_from(["config.json", "model.safetensors.index.json"]), edit=edits())
def test_values_of_a_hugging_face_model(name: str, edit: Callable[[Any], Any], hugging_face: Path) -> None:
    file = hugging_face / name
    whole = file.read_bytes()
    file.write_text(json.dumps(edit(json.loads(whole))))
    try:
        harmless(lambda: read_all(hugging_face), lines=True)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("key", ["head_dim", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"])
@pytest.mark.parametrize("size", [2**35, 10**30])
def test_a_size_that_no_machine_holds(key: str, size: int, hugging_face: Path) -> None:
    file = hugging_face / "config.json"
    whole = file.read_bytes()
    file.write_text(json.dumps(json.loads(whole) | {key: size}))
    try:
        with pytest.raises(InputError, match=rf"config.json: {key}: .* less than or equal to 1000.*, found {size}"):
            open_source(hugging_face)
    finally:
        file.write_bytes(whole)


def read_all(folder: Path) -> None:
    weights = open_source(folder).weights
    for name in weights:
        weights[name]


# ---- canaries: that they sing where a file's code is run -------------------------------------------------------


LOADERS: dict[str, Callable[[Path], object]] = {
    "pickle": lambda path: pickle.loads(path.read_bytes()),
    "torch": lambda path: torch.load(path, weights_only=False),
    "numpy": lambda path: np.load(path, allow_pickle=True),
    "yaml": lambda path: yaml.unsafe_load(path.read_bytes()),
    "yaml of a config": lambda path: yaml.unsafe_load(path.read_bytes()),
    "yaml of a program": lambda path: yaml.unsafe_load(path.read_bytes()),
}


@pytest.mark.parametrize("name", sorted(CANARIES))
def test_a_reader_that_runs_a_file_s_code_is_noticed(name: str, tmp_path: Path) -> None:
    path = tmp_path / "canary"
    path.write_bytes(CANARIES[name])
    with pytest.raises(AssertionError, match=r"code of the file was run: .*(sing|os\.system)"):
        harmless(lambda: LOADERS[name](path))


PROGRAMS: dict[str, Callable[[], object]] = {
    "os.system": lambda: os.system("true"),
    "subprocess.Popen": lambda: subprocess.run(["true"], check=True),
    "os.posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "pickle.find_class": lambda: pickle.loads(b"cbuiltins\nlen\n."),
}


@pytest.mark.parametrize("event", sorted(PROGRAMS))
def test_a_reader_that_starts_a_program_is_noticed_even_if_it_then_says_what_is_wrong(event: str) -> None:
    def read() -> None:
        PROGRAMS[event]()
        raise InputError("damaged")

    with pytest.raises(AssertionError, match=event):
        harmless(read)
    assert harmless(lambda: "quiet") == "quiet"
