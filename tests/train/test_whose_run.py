"""One folder, one run: who may write into it, whose metrics stand there, and what is wrong is said before work."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from nursery import Nursery
from tiny_run import (
    equal_bits,
    losses,
    metrics,
    saved_weights,
    tiny_config,
    tiny_yaml,
    train_and_listen,
    train_quietly,
    weights,
)

from kenotron.config import InputError


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists() and path.stat().st_size:
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not come")


def test_a_second_run_in_the_folder_of_a_living_one_is_refused_and_of_a_killed_one_is_not(
    nursery: Nursery, tmp_path: Path
) -> None:
    file = tiny_yaml(tmp_path)
    child = nursery.start("train", file, "general.hooks=[user_parts.SlowStep]", folder=tmp_path)
    wait_for(tmp_path / "logs" / "tiny" / "metrics.jsonl")
    elsewhere = f"logging.log_dir={tmp_path / 'other logs'}"
    with pytest.raises(InputError, match=r"another run is using .*checkpoints"):
        train_quietly(tiny_config(tmp_path, "general.seed=8", elsewhere))
    assert not (tmp_path / "other logs").exists()
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait().code == -9
    train_quietly(tiny_config(tmp_path))
    assert (tmp_path / "checkpoints" / "3").is_dir()


def test_a_run_that_failed_lets_its_folder_go(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        train_quietly(tiny_config(tmp_path, "general.hooks=[nowhere.Hook]"))
    train_quietly(tiny_config(tmp_path))


# ---- architectures by reference ----------------------------------------------------------------------------


def hf_folder(folder: Path) -> Path:
    """A Hugging Face model's folder with its shapes alone."""
    folder.mkdir()
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_run_whose_shapes_come_from_a_hugging_face_folder_goes_on_exactly(tmp_path: Path) -> None:
    shapes = f"model.model_config={{hf: '{hf_folder(tmp_path / 'hf')}'}}"
    elsewhere = f"checkpoints.checkpoints_path={tmp_path / 'whole'}"
    whole = tiny_config(tmp_path, shapes, "tokens.train_steps=6", "general.run=whole", elsewhere)
    expected = weights(train_quietly(whole))
    train_quietly(tiny_config(tmp_path, shapes, "tokens.train_steps=3"))
    config = tiny_config(tmp_path, shapes, "tokens.train_steps=6")
    run = train_quietly(config)
    assert losses(config) == losses(whole)
    assert equal_bits(weights(run), expected)


# ---- other people's checkpoints ----------------------------------------------------------------------------


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A trained model that went to Hugging Face's format and came back as checkpoint 0."""
    from kenotron.interop import from_hf, to_hf

    (tmp_path / "trained").mkdir()
    train_quietly(tiny_config(tmp_path / "trained"))
    to_hf(tmp_path / "trained" / "checkpoints" / "3", tmp_path / "hf", dtype="float32")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    return tmp_path / "imported"


def test_an_imported_checkpoint_is_resumed_from_at_step_0(imported: Path, tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, f"checkpoints.resume_checkpoint_path={imported}", "checkpoints.save_initial_state=true"
    )
    _, said = train_and_listen(config)
    assert "Loaded weights, schedule and data position of" in said
    assert [step["iteration"] for step in metrics(config)] == [1, 2, 3]
    start, trained = saved_weights(tmp_path / "checkpoints" / "0"), tmp_path / "trained" / "checkpoints" / "3"
    assert equal_bits(start, saved_weights(trained))


def test_a_checkpoint_that_leaves_no_step_to_do_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    train_quietly(tiny_config(first))
    source = f"checkpoints.resume_checkpoint_path={first / 'checkpoints' / '3'}"
    with pytest.raises(InputError, match=r"at step 3 and tokens\.train_steps is 3.*load_lr_scheduler: false"):
        train_quietly(tiny_config(second, source))
    train_quietly(tiny_config(second, source, "checkpoints.load_lr_scheduler=false"))


# ---- metrics of another run --------------------------------------------------------------------------------


def kept(folder: Path) -> list[list[int]]:
    """Steps in the metrics that were set aside."""
    files = sorted(folder.glob("metrics-replaced-*.jsonl"))
    return [[json.loads(line)["iteration"] for line in path.read_text().splitlines()] for path in files]


def test_a_run_of_the_same_name_with_other_checkpoints_erases_no_metrics(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "tokens.train_steps=4")
    train_quietly(config)
    other = f"checkpoints.checkpoints_path={tmp_path / 'wide'}"
    _, said = train_and_listen(tiny_config(tmp_path, "tokens.train_steps=2", other))
    assert kept(tmp_path / "logs" / "tiny") == [[1, 2, 3, 4]]
    assert "is of an earlier run; it is now metrics-replaced-" in said
    assert [step["iteration"] for step in metrics(config)] == [1, 2]


def test_going_on_with_the_first_after_the_second_keeps_both(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "tokens.train_steps=2")
    train_quietly(config)
    train_quietly(tiny_config(tmp_path, f"checkpoints.checkpoints_path={tmp_path / 'wide'}"))
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=4"))
    assert sorted(kept(tmp_path / "logs" / "tiny")) == [[1, 2], [1, 2, 3]]
    assert [step["iteration"] for step in metrics(config)] == [3, 4]


def test_a_run_that_goes_on_keeps_one_file_of_metrics(tmp_path: Path) -> None:
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=2"))
    config = tiny_config(tmp_path, "tokens.train_steps=4")
    train_quietly(config)
    assert kept(tmp_path / "logs" / "tiny") == []
    assert [step["iteration"] for step in metrics(config)] == [1, 2, 3, 4]


# ---- what is wrong is said before the data are opened -----------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.param_groups=[{pattern: nothing_here}]", "nothing_here"),
        ("general.hooks=[user_parts.Spi]", "did you mean 'Spy'"),
    ],
)
def test_a_wrong_hook_or_parameter_group_is_told_before_any_data_are_read(
    override: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the data were opened first")

    monkeypatch.setattr("kenotron.data.open_run", opened)
    with pytest.raises(InputError, match=said):
        train_quietly(tiny_config(tmp_path, override))


def test_no_thread_of_the_data_outlives_a_run_that_could_not_be_prepared(tmp_path: Path) -> None:
    stages = (
        "data_stages=[{name: A, start_training_step: 1, data: {dataset: null}}, "
        "{name: B, start_training_step: 3, data: {dataset: {source: user_parts.counting}}}]"
    )
    with pytest.raises(InputError, match=r"logging\.sample_prompts"):
        train_quietly(tiny_config(tmp_path, stages, 'logging.sample_prompts=["The"]'))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kenotron-stage")]
