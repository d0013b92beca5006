"""What is wrong with the arguments of `kenotron data` is told by the option's name, not by a config's key."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
