"""One folder, one run: who may write into it, whose metrics stand there, and what is wrong is said before work."""

import json
import os
import re
import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kenotron.checkpoint import durable
from kenotron.config import InputError
from support.nursery import Nursery
from support.tiny_llamas import hf_llama, save_hf
from support.tiny_run import (
    metrics,
    numbers,
    same_saved,
    text_overrides,
    tiny_config,
    tiny_yaml,
    train_and_listen,
    train_quietly,
)
from training.test_exact_resume import wait_for_steps


def test_a_run_of_the_name_of_a_living_one_is_refused(nursery: Nursery, tmp_path: Path, monkeypatch: Any) -> None:
    """And one in its folder of checkpoints; when it was killed, neither is."""
    monkeypatch.setattr(durable, "RELEASE_SECONDS", 0.2)
    child = nursery.start("train", tiny_yaml(tmp_path), "general.hooks=[support.user_parts.SlowStep]", folder=tmp_path)
    logs = tmp_path / "logs" / "tiny"
    wait_for_steps(tmp_path, 1)
    other_logs, elsewhere = f"logging.log_dir={tmp_path / 'l'}", f"checkpoints.checkpoints_path={tmp_path / 'other'}"
    with pytest.raises(InputError, match=r"another run is using .*checkpoints"):
        train_quietly(tiny_config(tmp_path, "general.seed=8", other_logs))
    assert not (tmp_path / "l").exists()
    with pytest.raises(InputError, match=r"^general\.run: another run is logging in .*tiny; wait until it has ended"):
        train_quietly(tiny_config(tmp_path, elsewhere))
    assert not list(logs.glob("replaced-*"))
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait().code == -9
    train_quietly(tiny_config(tmp_path, elsewhere))
    assert len(list(logs.glob("replaced-*"))) == 1
    train_quietly(tiny_config(tmp_path, other_logs))
    assert (tmp_path / "checkpoints" / "3").is_dir()


def test_a_lock_that_outlives_its_run_is_waited_for(tmp_path: Path) -> None:
    """A killed run's child holds it until it has begun its own program."""
    held = ExitStack()
    held.enter_context(durable.in_use(tmp_path))
    threading.Timer(0.3, held.close).start()
    started = time.monotonic()
    with durable.in_use(tmp_path):
        assert time.monotonic() - started > 0.2


def test_a_run_that_failed_lets_its_folder_go(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        train_quietly(tiny_config(tmp_path, "general.hooks=[nowhere.Hook]"))
    train_quietly(tiny_config(tmp_path))


# ---- architectures by reference ----------------------------------------------------------------------------


def test_a_run_whose_shapes_come_from_a_hugging_face_folder_goes_on_exactly(tmp_path: Path) -> None:
    shapes = f"model.model_config={{hf: '{save_hf(hf_llama(), tmp_path / 'hf')}'}}"
    for name, steps in (("whole", 6), ("parts", 3), ("parts", 6)):
        train_quietly(tiny_config(tmp_path / name, shapes, f"tokens.train_steps={steps}"))
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


# ---- other people's checkpoints ----------------------------------------------------------------------------


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A trained model that went to Hugging Face's format and came back as checkpoint 0."""
    from kenotron.interop import from_hf, to_hf

    train_quietly(tiny_config(tmp_path / "trained"))
    to_hf(tmp_path / "trained" / "checkpoints" / "3", tmp_path / "hf", dtype="float32")
    from_hf(tmp_path / "hf", tmp_path / "imported")
    return tmp_path / "imported"


def test_an_imported_checkpoint_is_resumed_from_at_step_0(imported: Path, tmp_path: Path) -> None:
    resume = f"checkpoints.resume_checkpoint_path={imported}"
    config = tiny_config(tmp_path, resume, "checkpoints.save_initial_state=true")
    _, said = train_and_listen(config)
    assert "Loaded weights, data position, schedule, step of" in said
    assert [step["iteration"] for step in metrics(config)] == [1, 2, 3]
    assert same_saved(tmp_path / "checkpoints" / "0", tmp_path / "trained" / "checkpoints" / "3")
    muon = "optimizer.optimizer_factory={name: muon}"  # what its config.yaml says of optimizers is a placeholder
    _, said = train_and_listen(tiny_config(tmp_path / "muon", resume, muon))
    assert "Resumed with" not in said


def test_a_checkpoint_that_leaves_no_step_to_do_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    train_quietly(tiny_config(first))
    source = f"checkpoints.resume_checkpoint_path={first / 'checkpoints' / '3'}"
    with pytest.raises(InputError, match=r"at step 3 and tokens\.train_steps is 3.*load_mode: transfer"):
        train_quietly(tiny_config(second, source))
    train_quietly(tiny_config(second, source, "checkpoints.load_lr_scheduler=false"))


# ---- metrics of another run --------------------------------------------------------------------------------


def kept(folder: Path) -> list[list[int]]:
    """Steps in the metrics that were set aside."""
    files = sorted(folder.glob("replaced-*/metrics.jsonl"))
    return [[json.loads(line)["iteration"] for line in path.read_text().splitlines()] for path in files]


@pytest.mark.parametrize("stands_there", ["a folder", "a link to nowhere"])
def test_metrics_that_cannot_be_written_are_one_line_before_the_first_step(stands_there: str, tmp_path: Path) -> None:
    train_quietly(tiny_config(tmp_path))
    file = tmp_path / "logs" / "tiny" / "metrics.jsonl"
    file.unlink()
    file.mkdir() if stands_there == "a folder" else file.symlink_to(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(InputError, match=rf"^logging\.log_dir: cannot write to {file}: (Is a directory|No such file)"):
        train_quietly(tiny_config(tmp_path, "tokens.train_steps=4"))


def test_metrics_are_kept_beside_a_config_that_is_damaged(tmp_path: Path) -> None:
    train_quietly(tiny_config(tmp_path))
    with (tmp_path / "logs" / "tiny" / "config.yaml").open("ab") as file:
        file.write(b"\xff")
    _, said = train_and_listen(tiny_config(tmp_path, "tokens.train_steps=4"))
    assert "tiny has metrics of an earlier run; they are now in " in said


def test_going_on_with_the_first_after_the_second_keeps_both(tmp_path: Path) -> None:
    config = train_quietly(tiny_config(tmp_path, "tokens.train_steps=2")).config
    train_quietly(tiny_config(tmp_path, f"checkpoints.checkpoints_path={tmp_path / 'wide'}"))
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=4"))
    assert sorted(kept(tmp_path / "logs" / "tiny")) == [[1, 2], [1, 2, 3]]
    assert [step["iteration"] for step in metrics(config)] == [3, 4]


# ---- what is wrong is said before the data are opened -----------------------------------------------------


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.param_groups=[{pattern: nothing_here}]", "nothing_here"),
        ("general.hooks=[support.user_parts.Spi]", "did you mean 'Spy'"),
    ],
)
def test_a_wrong_hook_or_parameter_group_is_first(override: str, said: str, tmp_path: Path, monkeypatch: Any) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("the data were opened first")

    monkeypatch.setattr("kenotron.data.open_run", opened)
    with pytest.raises(InputError, match=said):
        train_quietly(tiny_config(tmp_path, override))


def test_no_thread_of_the_data_outlives_a_run_that_could_not_be_prepared(tmp_path: Path) -> None:
    second = "{name: B, start_training_step: 3, data: {dataset: {source: support.user_parts.counting}}}"
    stages = f"data_stages=[{{name: A, start_training_step: 1, data: {{dataset: null}}}}, {second}]"
    with pytest.raises(InputError, match=r"logging\.sample_prompts"):
        train_quietly(tiny_config(tmp_path, stages, 'logging.sample_prompts=["The"]'))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kenotron-stage")]


# ---- the same data, or a word about it ---------------------------------------------------------------------


def change_texts(folder: Path) -> None:
    with (folder / "texts.jsonl").open("a") as file:
        for number in range(90):
            file.write(json.dumps({"text": f"entirely new words {number} zebra quagga " * 9}) + "\n")


def test_text_that_changed_is_a_warning_and_the_tokenizer_stays_the_checkpoints(tmp_path: Path) -> None:
    overrides = [*text_overrides(tmp_path), "checkpoints.checkpoint_interval=2"]
    train_quietly(tiny_config(tmp_path, *overrides))
    change_texts(tmp_path)
    _, said = train_and_listen(tiny_config(tmp_path, *overrides, "tokens.train_steps=6"))
    (warning,) = [line for line in said.splitlines() if "has changed since" in line]
    assert warning.startswith("warning: ")
    assert "texts.jsonl" in warning
    first, last = (tmp_path / "checkpoints" / step / "tokenizer" / "tokenizer.json" for step in ("3", "6"))
    assert first.read_bytes() == last.read_bytes()


def test_text_that_two_stages_read_in_two_ways_has_not_changed(tmp_path: Path) -> None:
    """A run that resumes in the second stage opens that one alone."""
    texts = tmp_path / "texts.jsonl"
    packed = f"{{name: b, start_training_step: 2, data: {{dataset: {{text_files: {texts}, packing: best_fit}}}}}}"
    stages = f"data_stages=[{{name: a, start_training_step: 1, data: {{dataset: {{text_files: {texts}}}}}}}, {packed}]"
    train_quietly(tiny_config(tmp_path, *text_overrides(tmp_path), stages))
    _, said = train_and_listen(tiny_config(tmp_path, *text_overrides(tmp_path), stages, "tokens.train_steps=6"))
    assert "Training from step 4 " in said
    assert "has changed since" not in said


def test_another_tokenizer_under_the_same_name_is_another_run(tmp_path: Path) -> None:
    overrides = text_overrides(tmp_path)
    train_quietly(tiny_config(tmp_path, *overrides, f"checkpoints.checkpoints_path={tmp_path / 'first'}"))
    named = tmp_path / "tokenizer"
    shutil.copytree(tmp_path / "first" / "3" / "tokenizer", named)
    overrides[1] = f"tokenizer={{tokenizer_name_or_path: '{named}'}}"
    train_quietly(tiny_config(tmp_path, *overrides))

    change_texts(tmp_path)
    again = [overrides[0], "tokenizer={train: {vocab_size: 299}}", *overrides[2:]]
    train_quietly(tiny_config(tmp_path, *again, f"checkpoints.checkpoints_path={tmp_path / 'second'}"))
    shutil.rmtree(named)
    shutil.copytree(tmp_path / "second" / "3" / "tokenizer", named)
    with pytest.raises(InputError, match=r"tokenizer: .* is not the tokenizer of .*checkpoints/3 \(hash"):
        train_quietly(tiny_config(tmp_path, *overrides, "tokens.train_steps=6"))
    source = f"checkpoints.resume_checkpoint_path={tmp_path / 'checkpoints' / '3'}"
    elsewhere = tmp_path / "transfer"
    _, said = train_and_listen(tiny_config(elsewhere, *overrides, source, "checkpoints.load_mode=transfer"))
    (warning,) = [line for line in said.splitlines() if "has changed since" in line]  # none of the text: it begins anew
    assert warning.startswith("warning: tokenizer has changed since")


# ---- small words of warning --------------------------------------------------------------------------------


def test_sequences_longer_than_the_model_has_positions_are_warned_of(tmp_path: Path) -> None:
    _, said = train_and_listen(tiny_config(tmp_path, "tokens.sequence_length=40", "tokens.train_steps=1"))
    (warning,) = [line for line in said.splitlines() if "max_position_embeddings only 32" in line]
    assert warning.startswith("warning: ")


def test_another_name_for_a_run_that_continues_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    train_quietly(tiny_config(tmp_path, "general.run=first_%date_%jobid"))
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    _, said = train_and_listen(tiny_config(tmp_path, "general.run=first_%date_%jobid", "tokens.train_steps=4"))
    assert "keeps its name" not in said
    _, said = train_and_listen(tiny_config(tmp_path, "general.run=second", "tokens.train_steps=5"))
    (warning,) = [line for line in said.splitlines() if "keeps its name: first_" in line]
    assert "not second" in warning
    (logs,) = (tmp_path / "logs").iterdir()
    assert re.fullmatch("first_2.*_4711", logs.name)
    assert len((logs / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_saved_config_of_another_schema_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_quietly(tiny_config(tmp_path))
    (tmp_path / "checkpoints" / "3" / "config.yaml").write_text("general: {project: old, colour: blue}\n")
    monkeypatch.setattr("kenotron.checkpoint.folders.newest_complete", lambda *_: tmp_path / "checkpoints" / "3")
    with pytest.raises(InputError, match=r"3/config\.yaml: .*another version of kenotron"):
        train_quietly(tiny_config(tmp_path, "tokens.train_steps=5"))


def test_the_last_line_says_how_long_the_steps_waited_for_data(tmp_path: Path) -> None:
    slow = "data_stages.0.data.dataset={source: support.user_parts.Trickle}"
    _, said = train_and_listen(tiny_config(tmp_path, slow, "data_stages.0.data.num_loading_workers=0"))
    (line,) = [line for line in said.splitlines() if "Run finished at step 3" in line]
    share = float(line.split("tokens; ")[1].split("%")[0])
    steps = metrics(tiny_config(tmp_path))
    waited, took = (sum(step[name] for step in steps) for name in ("data_wait_ms", "elapsed_time_per_iteration_ms"))
    assert share == pytest.approx(100 * waited / took, abs=0.06)
    assert share > 0


def test_rows_that_pad_the_vocabulary_are_zero_after_a_resume_and_with_weights_by_path(tmp_path: Path) -> None:
    pad = "model.make_vocab_size_divisible_by=50"
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=2", pad))
    weights_of = f"model.init_method={{path: '{tmp_path / 'checkpoints' / '2'}'}}"
    for config in (tiny_config(tmp_path, pad), tiny_config(tmp_path / "other", pad, weights_of)):
        table = train_quietly(config).model.model.embed_tokens.weight
        assert table.shape[0] == 100
        assert not table[64:].any()
