"""`tokens.val_datasets`: validation on datasets of the user's, all of each, instead of what stages hold out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenotron.config.errors import InputError
from kenotron.data import RunData
from kenotron.data.stage_plan import check_paths
from kenotron.prepare.download import data_requirements
from support.data_runs import opened, run_config, write_texts

LENGTH = 32


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    return {"text_files": str(write_texts(tmp_path / "train"))}


def labels_of(data: RunData) -> list[list[int]]:
    """The labels with a loss of each validation source, in the order in which they are read, on one rank."""
    found: list[list[int]] = [[] for _ in data.held_out().labels]
    for batch, _, source in data.validation():
        found[source] += batch.labels[batch.labels != -100].tolist()
    return found


def test_token_files_and_answers(texts: Any, tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16) % 400
    np.save(tmp_path / "own.npy", tokens)
    answers = tmp_path / "own.jsonl"
    answers.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": f"the {n}"}) + "\n" for n in range(5)))
    datasets = [{"tokens": str(tmp_path / "own.npy")}, {"text_files": str(answers), "sft_dataloader": True}]
    with opened(texts, val_datasets=datasets) as data:
        held = data.held_out()
        found = labels_of(data)
        assert held.labels == ["own.npy", "own.jsonl"]
        assert held.document_masking  # of the answers
        assert found[0] == tokens[1 : 1 + (len(tokens) - 1) // LENGTH * LENGTH].tolist()
        assert data.tokenizer is not None
        text = data.tokenizer.backend.decode(found[1])
        assert all(f"the {n}" in text for n in range(5)), text
        assert "?" not in text


def test_a_source_of_the_users_own_and_a_stream_to_train_on(texts: Any) -> None:
    """A stream validates on what it holds out only if it knows how much: not with a validation set."""
    stream = texts | {"streaming": {"shuffle_buffer": 5}}
    with opened(stream, val_datasets=[{"source": "support.user_parts.counting"}]) as data:
        held = data.held_out()
        assert held.labels == ["support.user_parts.counting"]
        assert len(held) > 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"packing": "best_fit"}, "packing: has no effect"),
        ({"streaming": {}}, "streaming: has no effect"),
        ({"text_files": {"a.txt": 1, "b.txt": 2}}, "text_files: expected a path or a list, found a map: shares"),
    ],
)
def test_keys_without_effect_are_refused(texts: Any, dataset: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"tokens\.val_datasets\.0\.{message}"):
        run_config(texts, val_datasets=[texts | dataset])


def test_missing_paths_and_too_few_tokens_are_reported(texts: Any, tmp_path: Path) -> None:
    missing = run_config(texts, val_datasets=[texts, {"text_files": str(tmp_path / "none")}])
    with pytest.raises(InputError, match=r"^tokens\.val_datasets\.1\.text_files: no such file or folder"):
        check_paths(missing)
    assert "tokens.val_datasets.1.text_files" in {required.key for required in data_requirements(missing)}
    np.save(tmp_path / "short.npy", np.arange(LENGTH, dtype=np.uint16))
    with pytest.raises(InputError, match=r"^tokens\.val_datasets\.0: .*short\.npy has less than a sequence: 32 tokens"):
        opened(texts, val_datasets=[{"tokens": str(tmp_path / "short.npy")}])
