"""Options of `data tokenize` that say what to read are used, or refused by their names, not by a config's key."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kenotron.config.errors import InputError
from kenotron.prepare.inputs import first_texts, open_input
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from support.tiny_run import Shell

WRONG = {
    "a.txt --tokenizer /nope": "--tokenizer: no such file or folder",
    "org/name --tokenizer t": "INPUT: 'org/name' is not in the local",
    "rows --tokenizer t --column x": "--column: dataset rows: ",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from datasets import Dataset, DatasetDict, config
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # read when it was imported
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    (tmp_path / "a.txt").write_text("some words")
    train_byte_level_bpe(["some words"], 300).save(tmp_path / "t")
    DatasetDict({"train": Dataset.from_dict({"text": ["some words"]})}).save_to_disk(tmp_path / "rows")
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_the_option_is_named(here: Path, case: str, shell: Shell) -> None:
    code, _, said = shell("data", "tokenize", *case.split(), "--output", "o")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"error: {WRONG[case]}")


def test_python_m_kenotron_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kenotron", "data", "inspect", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    expected = "error: token files: no such file or folder: nowhere (looked for /"
    assert (done.returncode, done.stderr[: len(expected)]) == (2, expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.md", {"column": "body"}, r"--column: .*a\.md: text files have no columns; expected jsonl, parquet or"),
        ("a.jsonl", {"split": "test"}, r"--split: .*a\.jsonl is neither a dataset of the hub nor a folder"),
        ("a.txt", {"config_name": "en"}, r"--config-name: .*a\.txt is neither a dataset of the hub"),
    ],
)
def test_what_an_input_does_not_have_is_refused(name: str, options: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=message):
        open_input(str(tmp_path / name), **options)


def test_rows_without_text_of_a_saved_dataset_are_skipped_and_counted(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a", None, "b"]}).save_to_disk(tmp_path / "saved")
    texts = open_input(str(tmp_path / "saved"), skip_bad=True)
    assert [chunk.text for chunk in texts.documents()] == ["a", "b"]
    assert texts.skipped == 1
    with pytest.raises(InputError, match="row 2: column 'text' must hold text, found null"):
        list(open_input(str(tmp_path / "saved")).documents())


def test_a_tokenizer_is_trained_on_the_same_share_of_every_input(tmp_path: Path) -> None:
    for name, letter in (("a", "x"), ("b", "y")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": letter * 5}) + "\n" for _ in range(100)))
    texts = [open_input(str(tmp_path / f"{name}.jsonl")) for name in "ab"]
    assert list(first_texts(texts, 40)) == ["x" * 5] * 4 + ["y" * 5] * 4
