"""Hooks: the moments of a run come in their order, state survives, and a hook may end the run."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.checkpoint.reading import read_tensors
from kenotron.config import InputError
from kenotron.config.errors import RunFailed, human_format
from kenotron.observers import observers, validation
from kenotron.parallel.mesh import Mesh
from kenotron.training.build import build_hooks
from kenotron.training.hooks import Hook, load_hook
from support import user_parts
from support.tiny_run import metrics, saved_weights, slow_copies, tiny_config, train_and_listen, train_quietly

RECORDER = "general.hooks=[support.user_parts.Recorder]"
NAMED = ", ".join(f"{{path: support.user_parts.Recorder, kwargs: {{name: {name}}}}}" for name in "ab")
RECORDERS = f"general.hooks=[{NAMED}]"
VALIDATION = ("tokens.val_check_interval=2", "tokens.limit_val_batches=1")


def recorders(run: Any) -> list[user_parts.Recorder]:
    return [hook for hook in run.hooks if isinstance(hook, user_parts.Recorder)]


def test_moments_come_in_their_order(tmp_path: Path) -> None:
    run = train_quietly(tiny_config(tmp_path, RECORDER, *VALIDATION, "checkpoints.checkpoint_interval=2"))
    (recorder,) = recorders(run)
    assert recorder.moments == [
        *("on_train_start 0", "before_step 0", "before_update 0", "after_step 1"),
        *("before_step 1", "before_update 1", "after_validation 2", "after_step 2", "on_save 2"),
        *("before_step 2", "before_update 2", "after_validation 3", "after_step 3"),
        *("on_train_end 3", "on_save 3", "on_close"),
    ]


def test_before_an_update_gradients_are_clipped(tmp_path: Path) -> None:
    run = train_quietly(tiny_config(tmp_path, RECORDER, "optimizer.clip_grad=0.25"))
    assert metrics(run.config)[-1]["grad_norm"] > 0.25
    assert recorders(run)[0].norm == pytest.approx(0.25, rel=1e-4)


def test_a_skipped_step_has_no_update(tmp_path: Path) -> None:
    hooks = "general.hooks=[support.user_parts.Recorder, {path: support.user_parts.Poison, kwargs: {steps: [2]}}]"
    (recorder,) = recorders(train_quietly(tiny_config(tmp_path, hooks)))
    assert "before_step 1" in recorder.moments
    assert "before_update 1" not in recorder.moments
    assert "after_step 2" in recorder.moments


def test_state_survives_a_restart_also_of_two_hooks_of_one_class(tmp_path: Path) -> None:
    train_quietly(tiny_config(tmp_path, RECORDERS))
    state = json.loads((tmp_path / "checkpoints" / "3" / "manifest.json").read_text())["state"]["hooks"]
    assert state["support.user_parts.Recorder"] == {"seen": 3, "name": "a"}
    assert state["support.user_parts.Recorder#2"] == {"seen": 3, "name": "b"}
    run = train_quietly(tiny_config(tmp_path, RECORDERS, "tokens.train_steps=5"))
    assert [recorder.seen for recorder in recorders(run)] == [5, 5]


@pytest.mark.parametrize("engine", ["torch", "datastates"])
def test_tensors_of_a_state_survive_a_restart(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_copies(monkeypatch)  # the hook changes its tensors in `before_step`, while the engine copies
    saves = (f"checkpointing_engine={engine}", "checkpoint_interval=1", "save_initial_state=true")
    keys = ("general.hooks=[support.user_parts.Averages]", *(f"checkpoints.{key}" for key in saves))
    train_quietly(tiny_config(tmp_path, *keys))
    resumed = train_quietly(tiny_config(tmp_path, *keys, "tokens.train_steps=5"))
    path, name = tmp_path / "checkpoints", "support.user_parts.Averages"
    weights = [saved_weights(path / str(step)) for step in range(5)]
    average = weights[0]
    for step in range(1, 6):
        saved = read_tensors(path / str(step), folder="hooks")
        assert len(saved) == len(average) + 3
        for key in average:
            if step > 1:
                average[key] = 0.5 * average[key] + 0.5 * weights[step - 1][key]
            assert torch.equal(saved[f"{name}.average.{key}"], average[key]), (step, key)
        state = json.loads((path / str(step) / "manifest.json").read_text())["state"]["hooks"][name]
        assert state["counts"] == [step, [{"kenotron.tensor": f"{name}.counts.1.0"}, None]]
    (hook,) = [each for each in resumed.hooks if isinstance(each, user_parts.Averages)]
    assert hook.count == 5


def test_hooks_may_change_between_the_parts_of_a_run(tmp_path: Path) -> None:
    train_quietly(tiny_config(tmp_path))
    run = train_quietly(tiny_config(tmp_path, RECORDER, "tokens.train_steps=4"))
    assert recorders(run)[0].seen == 1
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=5"))


def test_hooks_are_called_by_priority_and_then_in_the_order_of_the_list(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, RECORDERS, *VALIDATION)
    hooks = build_hooks(config, Mesh(), observers(config, Mesh()))
    assert [type(hook).__name__ for hook in hooks] == [
        *("NonFiniteCause", "Validation", "DataStall", "History", "Recorder", "Recorder", "StateHash", "Metrics"),
        *("NonFiniteGuard", "Pace", "Signals", "CheckpointHook"),
    ]
    assert [hook.name for hook in hooks if isinstance(hook, user_parts.Recorder)] == ["a", "b"]


def test_a_recorded_metric_is_part_of_its_step_in_the_log_and_the_metrics(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "general.hooks=[support.user_parts.Measures]")
    _, said = train_and_listen(config)
    first, second, third = metrics(config)
    assert all(step["twice_the_loss"] == 2 * step["lm_loss"] for step in (first, second, third))
    assert (first["mean_rank"], first["highest_rank"]) == (0, 0)
    assert "parameters" in first
    assert "parameters" not in second
    lines = [line for line in said.splitlines() if line.startswith("step ")]
    for step, line in zip(metrics(config), lines, strict=True):
        assert f"| twice_the_loss {human_format(step['twice_the_loss'])}" in line


def test_a_metric_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "general.hooks=[{path: support.user_parts.Measures, kwargs: {name: grad_norm}}]")
    with pytest.raises(RunFailed, match=r"step 1: a hook recorded the metric 'grad_norm', which every step has"):
        train_quietly(config)


def test_hooks_learn_of_an_error_before_they_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(user_parts.Recorder, "on_error", lambda self, run, error: said.append(f"{run.step} {error}"))
    monkeypatch.setattr(user_parts.Recorder, "on_close", lambda self, run: said.append("closed"))
    monkeypatch.setattr(user_parts.Broken, "on_error", lambda self, run, error: 1 / 0, raising=False)
    config = tiny_config(tmp_path, "general.hooks=[support.user_parts.Broken, support.user_parts.Recorder]")
    with pytest.raises(RuntimeError, match="this hook is broken"):
        train_quietly(config)
    assert said == ["1 this hook is broken", "closed"]


def test_a_function_that_returns_a_hook_will_do_and_anything_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(load_hook("support.user_parts.Poison", {"steps": [1]}), Hook)
    with pytest.raises(InputError, match=r"general\.hooks: support\.user_parts\.counting made a list"):
        load_hook("support.user_parts.counting", {"sequence_length": 4, "seed": 0})
    with pytest.raises(InputError, match=r"cannot be called with .*missing a required argument: 'steps'"):
        load_hook("support.user_parts.Poison", {"step": 1})
    misspelt = type("Misspelt", (Hook,), {"after_stepp": lambda self, run, result: None, "_on_own": None})
    monkeypatch.setattr("support.user_parts.Misspelt", misspelt, raising=False)
    with pytest.raises(InputError, match=r"Misspelt\.after_stepp is never called: .* did you mean 'after_step'"):
        load_hook("support.user_parts.Misspelt", {})


VALIDATING = ("tokens.val_check_interval=1", "tokens.limit_val_batches=-1", "tokens.train_steps=4")


def test_a_run_asked_to_stop_saves_without_validating_first(tmp_path: Path) -> None:
    terminate = "general.hooks=[{path: support.user_parts.TerminateIn, kwargs: {step: 2}}]"
    _, said = train_and_listen(tiny_config(tmp_path, *VALIDATING, terminate, "checkpoints.checkpoint_interval=2"))
    assert "validation: 1 / 4" in said
    assert "validation: 2 / 4" not in said
    assert "the validation after step 2 is left out, as the run stops" in said
    assert "SIGTERM: saving after step 2 and stopping" in said
    assert (tmp_path / "checkpoints" / "2" / "manifest.json").exists()


@pytest.mark.parametrize("last", [1, 4])
def test_a_validation_under_way_gives_way_to_the_checkpoint(tmp_path: Path, monkeypatch: Any, last: int) -> None:
    to_device, batches = validation.to_device, []

    def and_terminate(*given: object) -> object:
        batches.append(given)
        if len(batches) == 3:
            signal.raise_signal(signal.SIGTERM)
        return to_device(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(validation, "to_device", and_terminate)
    _, said = train_and_listen(tiny_config(tmp_path, *VALIDATING, f"tokens.train_steps={last}"))
    assert len(batches) == 3
    assert "validation: 1 /" not in said
    assert "the validation after step 1 is left out, as the run stops" in said
    assert (tmp_path / "checkpoints" / "1" / "manifest.json").exists()


def test_a_step_that_waits_for_its_batches_is_a_data_stall_in_the_log(tmp_path: Path) -> None:
    source = "{source: support.user_parts.LateOnce, kwargs: {seconds: 1.2}}"
    data = f"data_stages.0.data={{seed: 3, num_loading_workers: 1, dataset: {source}}}"
    _, said = train_and_listen(tiny_config(tmp_path, data, "parallelism.timeout_seconds=0.5"))
    stall, *_ = [line for line in said.splitlines() if "data stall" in line]
    expected = r"warning: step 3 has waited \d s for its batches, a data stall: reading at user_parts\.py:\d+ in "
    assert re.fullmatch(expected + "__getitem__", stall)
