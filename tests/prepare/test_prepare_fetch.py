"""`kenotron data fetch`: what a run needs, by its config; then the run does without a hub."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from kenotron.config.errors import InputError
from kenotron.prepare.download import RequiredFile, data_requirements, fetch
from support.data_runs import run_config, write_texts
from support.hub_cache import DATASET, TOKENIZER, make_tokenizer_repository
from support.hub_server import Hub
from support.tiny_run import KENOTRON

HUB_DATA = {"hf_dataset_or_datasets": DATASET}


def command(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``kenotron data fetch``, with nothing of this process's Hugging Face settings."""
    clean = {name: value for name, value in os.environ.items() if not re.match("(?i)HF_|.*PROXY", name)}
    line = [*KENOTRON, "data", "fetch", *arguments]
    return subprocess.run(line, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run on a dataset and with a tokenizer of the hub, and on local text."""
    write_texts(tmp_path / "texts", 3)
    both = {"mixture": [HUB_DATA | {"weight": 1}, {"text_files": "texts", "weight": 1}]}
    made = run_config(both, tokenizer__tokenizer_name_or_path=TOKENIZER)
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(made.model_dump(mode="json", by_alias=True, exclude_none=True)))
    return file


def test_what_is_in_the_caches_is_found_without_a_hub(config: Path, hub_home: Path) -> None:
    done = command(config.parent, str(config), HF_HOME=str(hub_home), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"tokenizer {TOKENIZER}: ")
    assert str(hub_home / "hub") in lines[0]
    assert lines[1].startswith(f"dataset {DATASET} (train): ")
    assert str(hub_home / "datasets") in lines[1]
    assert lines[2].startswith("path texts: ")
    assert lines[3] == "Ready: the run can start offline (HF_HUB_OFFLINE=1)"


@pytest.mark.slow
def test_files_of_a_hub_are_downloaded_and_then_no_hub_is_needed(tmp_path: Path) -> None:
    snapshot = make_tokenizer_repository(tmp_path / "made", TOKENIZER)
    files = {file.name: file.read_bytes() for file in snapshot.iterdir()}
    config = tmp_path / "my.yaml"
    write_texts(tmp_path / "texts", 3)
    made = run_config({"text_files": "texts"}, tokenizer__tokenizer_name_or_path="someone/words")
    config.write_text(yaml.safe_dump(made.model_dump(mode="json", by_alias=True, exclude_none=True)))
    home = str(tmp_path / "home")
    with Hub() as hub:
        hub.push("someone/words", files)
        first = command(tmp_path, str(config), HF_HOME=home, HF_ENDPOINT=hub.url)
    size = sum(map(len, files.values()))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"tokenizer someone/words: {size / 1000:.3g} kB, {home}/hub/models--someone")
    again = command(tmp_path, str(config), HF_HOME=home, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout


def test_every_path_that_is_missing_is_named_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts", 2)
    (tmp_path / "empty").mkdir()
    config = run_config(
        {"mixture": [{"text_files": ["text", "texts"], "weight": 1}, {"tokens": {"empty": 2}, "weight": 1}]},
        {"dataset_folder": "no/where"},
    )
    with pytest.raises(InputError) as caught:
        fetch(data_requirements(config), lambda line: None)
    first, second, third = str(caught.value).splitlines()
    parts = "data_stages.0.data.dataset.mixture"
    assert first.startswith(f"{parts}.0.text_files: no such file or folder: text; did you mean 'texts'? (looked for /")
    assert second == f"{parts}.1.tokens: folder empty is empty"
    assert third.startswith("data_stages.1.data.dataset.dataset_folder: no such file or folder: no/where")


def test_the_same_thing_is_fetched_once_and_measured(tmp_path: Path) -> None:
    calls = []

    def download() -> list[Path]:
        calls.append(1)
        (tmp_path / "new").write_bytes(b"x" * 1000)
        return [tmp_path / "new", tmp_path / "old"]

    (tmp_path / "old").write_bytes(b"y" * 300)
    twice = [RequiredFile("dataset", "a", "key", download)] * 2
    met, remote = fetch([*twice, RequiredFile("remote", "s3://b", "key")], lambda line: None)
    assert (len(calls), met.size, met.place) == (1, 1300, tmp_path)
    assert (remote.required.name, remote.place) == ("s3://b", None)


def test_needs_are_those_of_every_stage_and_source() -> None:
    config = run_config(
        {"mixture": [HUB_DATA | {"hf_dataset_splits": ["train", "test"], "weight": 1}, {"source": "a.b", "weight": 2}]},
        {"tokens": ["s3://bucket/tokens", "here"]},
        {"corpus": "python-stdlib"},
        None,
        tokenizer__tokenizer_name_or_path=TOKENIZER,
        train_steps=40,
    )
    found = [(required.kind, required.name) for required in data_requirements(config)]
    assert found == [
        ("tokenizer", TOKENIZER),
        ("dataset", f"{DATASET} (train)"),
        ("dataset", f"{DATASET} (test)"),
        ("own code", "a.b"),
        ("remote", "s3://bucket/tokens"),
        ("path", "here"),
    ]
