"""Stages and sources from the side of the run: its end when data are used up, what may be edited, what is measured."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kenotron.config import InputError
from kenotron.observers.validation import evaluate
from kenotron.training.step import to_device
from support.tiny_run import losses, metrics, text_overrides, tiny_config, train_and_listen, train_quietly, write_texts

LIMITED = "data_stages.0.data.dataset={source: support.user_parts.counting, max_epochs: 0.01, kwargs: {rows: 1100}}"


def test_a_run_whose_data_are_used_up_ends_in_good_order(tmp_path: Path) -> None:
    """1,095 rows are trained on, of which 10 may be: two steps of four."""
    overrides = (LIMITED, "tokens.train_steps=9", "tokens.val_check_interval=50", "tokens.limit_val_batches=1")
    run, said = train_and_listen(tiny_config(tmp_path, *overrides, "checkpoints.save_final_state=false"))
    assert (run.step, run.stop_reason) == (2, "'support.user_parts.counting' is exhausted after 0.01 epochs")
    assert [step["iteration"] for step in metrics(run.config)] == [1, 2]
    assert "val_loss" in metrics(run.config)[-1]  # as after every last step
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert "counting reaches its 0.01 epochs at step 3: the run ends after step 2" in said
    assert [f"step {step}/2 " in said for step in (1, 2)] == [True, True]
    assert (run.last_step, run.total_tokens) == (2, 2 * 4 * run.config.tokens.sequence_length)
    assert "Run stopped ('support.user_parts.counting' is exhausted after 0.01 epochs) at step 2 of 9" in said
    _, said = train_and_listen(tiny_config(tmp_path, *overrides))
    assert f"This run is finished: after step 2 of 9, {run.stop_reason}" in said
    assert len(metrics(run.config)) == 2


def test_a_run_goes_on_with_the_sources_that_are_left_and_resumes_there(tmp_path: Path) -> None:
    up = "{weight: 1, source: support.user_parts.counting, max_epochs: 0.01}"
    parts = f"{up}, {{weight: 3, source: support.user_parts.counting_down}}"
    data = (f"dataset={{mixture: [{parts}]}}", "when_exhausted=renormalise")
    mixed = ("checkpoints.checkpoint_interval=5", *(f"data_stages.0.data.{key}" for key in data))
    whole = train_quietly(tiny_config(tmp_path / "whole", *mixed, "tokens.train_steps=14"))
    assert [end for _, end in whole.data.stage_of(1).order.mixing.reached] == [38]  # within step 10
    for steps in (5, 10, 14):
        run = train_quietly(tiny_config(tmp_path / "parts", *mixed, f"tokens.train_steps={steps}"))
    assert losses(run.config) == losses(whole.config)


# ---- what may be edited ------------------------------------------------------------------------------------


def stages(*given: dict[str, Any]) -> str:
    """counting from step 1, counting down from step 4, and what is given on top, by stage."""
    up, down = ({"dataset": {"source": f"support.user_parts.{name}"}} for name in ("counting", "counting_down"))
    content = [
        {"name": "up", "start_training_step": 1, "data": {**up, "seed": 3}},
        {"name": "down", "start_training_step": 4, "data": down},
    ]
    changed = [one | more for one, more in zip(content, (*given, {}, {}))]
    return f"data_stages={json.dumps(changed + list(given[2:]))}"


OTHER = {"dataset": {"source": "support.user_parts.counting", "kwargs": {"start": 5}}}
OTHER_DOWN = stages({}, {"data": OTHER})
THIRD = {"name": "third", "start_training_step": 6, "data": OTHER}
EARLY = THIRD | {"start_training_step": 5}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped in its first stage, after step 2, and in its second, after step 5."""
    folder = tmp_path_factory.mktemp("stopped")
    for steps in (2, 5):
        train_quietly(tiny_config(folder, stages(), f"tokens.train_steps={steps}"))
    return folder


def resumed(stopped: Path, tmp_path: Path, at: int, *overrides: str) -> tuple[Any, str]:
    """The run of 7 steps that goes on from the checkpoint of step `at`."""
    shutil.copytree(stopped / "checkpoints" / str(at), tmp_path / "checkpoints" / str(at))
    return train_and_listen(tiny_config(tmp_path, "tokens.train_steps=7", *overrides))


@pytest.mark.parametrize(
    ("edited", "named"),
    [
        (OTHER_DOWN, "'down'"),
        (stages({}, {}, THIRD), "'third'"),
        (stages().split(', {"name": "down"')[0] + "]", "'down'"),
        (stages({}, {"sequence_length": 8}), "'down'"),
        (stages({}, {"name": "another name"}), None),
    ],
)
def test_a_stage_that_begins_later_may_be_edited(stopped: Path, tmp_path: Path, edited: str, named: str | None) -> None:
    run, said = resumed(stopped, tmp_path, 2, edited)
    assert run.step == 7
    lines = [line for line in said.splitlines() if "these stages differ from" in line]
    assert [line.split(": ")[-1] for line in lines] == ([] if named is None else [named])
    fresh = train_quietly(tiny_config(tmp_path / "whole", "tokens.train_steps=7", edited))
    assert losses(run.config) == losses(fresh.config)[2:]


@pytest.mark.parametrize(
    ("edited", "message"),
    [
        (stages({"data": OTHER}), r"data_stages.0.data.dataset.* of stage 'up' is"),
        (OTHER_DOWN, r"data_stages.1.data.dataset.source of stage 'down' is 'support.user_parts.counting_down' "),
        (stages({}, {"start_training_step": 6}), r"a stage begins at step 4 in the run and not in this config"),
        (stages({}, {}, EARLY), r"a stage begins at step 5 not in the run but in this config"),
        (stages({}, {"sequence_length": 8}), r"data_stages.1.sequence_length of stage 'down' is 16 there and 8 in"),
    ],
)
def test_a_stage_that_has_begun_stays_what_it_was(stopped: Path, tmp_path: Path, edited: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"5 is at step 5, .*{message}.*; put that back .*--fresh"):
        resumed(stopped, tmp_path, 5, edited)
    elsewhere = f"checkpoints.resume_checkpoint_path={stopped / 'checkpoints' / '5'}"
    config = tiny_config(tmp_path / "new", "tokens.train_steps=7", edited, elsewhere)
    with pytest.raises(InputError, match=rf"{message}.*load_mode: transfer"):
        train_quietly(config)
    anew = ("tokens.train_steps=2", "checkpoints.load_lr_scheduler=false")
    assert train_quietly(tiny_config(tmp_path / "new", edited, elsewhere, *anew)).step == 2


# ---- what is measured --------------------------------------------------------------------------------------


def test_every_source_is_measured_by_itself_and_the_total_is_theirs(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        write_texts(folder)
    parts = ", ".join(f"{{weight: {weight}, text_files: '{folder}'}}" for weight, folder in zip((3, 1), folders))
    mixture, z_loss = f"data_stages.0.data.dataset={{mixture: [{parts}]}}", "model.model_config.z_loss_enabled=true"
    validation = ("tokens.val_check_interval=2", "tokens.limit_val_batches=-1", "tokens.val_fraction=0.1")
    overrides = (*text_overrides(tmp_path)[1:], mixture, *validation, z_loss)  # the z-loss is no part of val_loss
    for steps in (3, 5):
        run = train_quietly(tiny_config(tmp_path, *overrides, f"tokens.train_steps={steps}"))
    order = run.data.stage_of(1).order
    for step in metrics(run.config):
        numbers, _ = order.locate(np.arange(4 * step["iteration"]))
        for number, label in enumerate(("one", "two")):
            drawn = int((numbers == number).sum())
            assert step[f"consumed_tokens/{label}"] == 16 * drawn
            assert step[f"epochs/{label}"] == drawn / order.lengths[number]
    last = metrics(run.config)[-1]
    sums = np.zeros((2, 2))
    run.model.eval()
    with torch.no_grad():
        for batch, _, source in run.data.validation():
            found = evaluate(run, to_device(batch, run))
            assert found is not None
            sums[source] += [float(found[0] - found[1]), int((batch.labels != -100).sum())]
    assert last["val_loss"] == pytest.approx(sums[:, 0].sum() / sums[:, 1].sum(), rel=1e-6)
    for number, label in enumerate(("one", "two")):
        assert last[f"val_loss/{label}"] == pytest.approx(sums[number, 0] / sums[number, 1], rel=1e-6)
        assert last[f"val_bits_per_byte/{label}"] > 0
