"""Keys of `data_stages` that could change nothing are refused, and what is wrong is named by the whole key.

A key that another file may need, nanotron's or a mix file's, is taken where it means what it always means.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kenotron.config import Config, InputError, load, to_dict
from kenotron.data import open_run
from support.data_runs import run_config
from support.tiny_run import Shell
from support.written_tokens import write_ds

AT = "data_stages.0.data"
TOKENS = {"tokens": "a"}
TWO = {"mixture": [{"weight": 1, "tokens": "a"}, {"weight": 2, "tokens": "b"}]}
TWO_KINDS = {"mixture": [{"weight": 1, "tokens": "a"}, {"weight": "size", "tokens": "b"}]}
UNENDED = {"dataset_folder": "a", "packing": "best_fit", "return_positions": False}
EPOCHS = {"max_epochs": 2}


def of(dataset: Any, **data: Any) -> dict[str, Any]:
    """A config whose first stage has these keys of `data`."""
    content = to_dict(run_config(None, tokenizer__tokenizer_name_or_path="gpt2"))
    content["data_stages"][0]["data"] |= {"dataset": dataset, **data}
    return content


REFUSED = {
    "temperature of a path": (of(TOKENS, temperature=2), f"{AT}.temperature: expected 1 with a single source, found 2"),
    "temperature of a list that is one text": (of({"text_files": ["a", "b"]}, temperature=2), f"{AT}.temperature: "),
    "nobody shares on": (of(TOKENS | EPOCHS, when_exhausted="renormalise"), f"{AT}.when_exhausted: expected stop or"),
    "weights of two kinds": (of(TWO_KINDS), f"{AT}.dataset.mixture: expected weights of one kind"),
    "no limit": (of(TWO, when_exhausted="repeat"), f"{AT}.when_exhausted: expected max_epochs to be set in a dataset"),
    "nothing to restart": (
        of(TOKENS, restart=True),
        f"{AT}.restart: expected false: there is no stage before the first",
    ),
    "rows without ends": (of(UNENDED), f"{AT}.dataset.return_positions: expected true with packing: best_fit"),
    "nothing is remote": (of(TOKENS) | {"remote_data": {"tries": 2}}, "remote_data: expected a remote path"),
    "a revision of nothing": (
        of(None) | {"tokenizer": {"tokenizer_revision": "main"}},
        "tokenizer.tokenizer_revision: expected null without tokenizer_name_or_path",
    ),
    "a stream of tokens": (of(TOKENS | {"streaming": {}}), f"{AT}.dataset"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_change_nothing_is_refused_by_its_whole_key(case: str) -> None:
    content, message = REFUSED[case]
    with pytest.raises(InputError) as caught:
        load(content)
    (line,) = str(caught.value).splitlines()
    assert message in line


# ---- found while opening and reading -----------------------------------------------------------------------


rows = [[3] * 33] * 40


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_ds(tmp_path / "ds" / "0.ds", [np.arange(100)] * 40, tokenizer=None)
    np.save(tmp_path / "ids.npy", np.arange(500, dtype=np.uint16) % 300)
    (tmp_path / "a.txt").write_text("some words " * 200)
    (tmp_path / "mix.json").write_text(json.dumps({"ds": 0}))
    return tmp_path


DS, ONE = {"tokens": "ds"}, {"weight": 1}
D = "data_stages.0.data.dataset"
FOUND = {
    "a weight in it": ([{"tokens": "mix.json"}], f"{D}.tokens: mix.json, 'ds': expected a map path → weight above 0"),
    "a hub's rows": ([{"hf_dataset_or_datasets": {"a": 0}}], f"{D}.hf_dataset_or_datasets: the fraction of 'a'"),
    "a mixture's": (
        [{"mixture": [DS | ONE, {"tokens": "no"} | ONE]}],
        f"{D}.mixture.1.tokens: no such file or folder: no",
    ),
    "arguments of what is there": (
        [{"source": "test_strict_keys.rows", "kwargs": {"n": 2}}],
        f"{D}.kwargs: test_strict_keys.rows is a list, which cannot be called with them",
    ),
    "a later stage": ([DS, {"source": "no.such"}], "data_stages.1.data.dataset.source: "),
}


def first_failure(config: Config) -> str:
    with pytest.raises(InputError) as caught, open_run(config, report=lambda line: None) as data:
        [data.batch(step) for step in (1, 7)]
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("case", FOUND)
def test_what_is_wrong_with_the_data_is_named_by_the_whole_key(here: Path, case: str) -> None:
    stages, message = FOUND[case]
    assert first_failure(run_config(*stages, val_samples=32)).startswith(message)


def test_a_stage_that_restarts_what_nobody_read_is_refused(here: Path, shell: Shell) -> None:
    content = to_dict(run_config(DS, {"tokens": "ids.npy"}))
    content["data_stages"][1]["data"]["restart"] = True
    message = "data_stages.1.data.restart: expected false: no earlier stage reads any of its sources"
    assert first_failure(load(content)) == message
    (here / "my.yaml").write_text(yaml.safe_dump(content))
    assert shell("config", "check", "my.yaml") == (2, "", f"error: {message}\n")


def test_what_a_stream_or_a_missing_copy_leave_undone_is_reported(here: Path) -> None:
    lines: list[str] = []
    stream = run_config({"text_files": "a.txt", "streaming": {}}, data__num_loading_workers=3, val_check_interval=-1)
    copies = run_config({"dataset_folder": "ds", "dataset_read_path": "copies"})
    tokens = run_config(DS, tokenizer__tokenizer_max_length=8)
    for config in (stream, copies, tokens):
        with open_run(config, report=lines.append) as data:
            data.loader(1, 2).close()
    assert "num_loading_workers: a stream is read in order, so 1 thread reads ahead, not 3" in lines
    assert "warning: tokenizer.tokenizer_max_length cuts nothing: no stage reads text" in lines
    assert "warning: copies (dataset_read_path) has none of the files of ds: the originals are read" in lines
