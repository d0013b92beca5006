"""Where a run begins, what of a checkpoint it takes, and which checkpoints it leaves."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kenotron as kn
from kenotron.checkpoint.checkpoints import Checkpoints
from kenotron.checkpoint.local import run_folders
from kenotron.config import InputError
from kenotron.launch.training import name_before_start
from support import user_parts
from support.checkpoint_states import flip_a_byte
from support.tiny_run import (
    equal_bits,
    losses,
    metrics,
    same_saved,
    saved_weights,
    tiny_config,
    train_and_listen,
    train_quietly,
)
from training.test_restart_modes import train_start

RATES = "optimizer.learning_rate_scheduler={learning_rate: 0.01, lr_warmup_steps: 4, lr_decay_style: constant}"


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of 8 steps with a checkpoint at 4."""
    keys = (RATES, "tokens.train_steps=8", "checkpoints.checkpoint_interval=4")
    return train_quietly(tiny_config(tmp_path_factory.mktemp("earlier"), *keys)).config


def start_from(earlier: Any, folder: Path, *overrides: str) -> Any:
    path = Path(earlier.checkpoints.checkpoints_path) / "4"
    source = f"checkpoints.resume_checkpoint_path={path}"
    return tiny_config(folder, RATES, "tokens.train_steps=8", source, *overrides)


def test_a_checkpoint_of_another_run_is_continued_exactly(earlier: Any, tmp_path: Path) -> None:
    config = start_from(earlier, tmp_path)
    _, said = train_and_listen(config)
    assert "Loaded weights, optimizer, data position, schedule, step of" in said
    assert [step["iteration"] for step in metrics(config)] == [5, 6, 7, 8]
    assert "were trained with" not in said
    assert losses(config) == losses(earlier)[4:]
    final = saved_weights(Path(earlier.checkpoints.checkpoints_path) / "8")
    assert equal_bits(saved_weights(tmp_path / "checkpoints" / "8"), final)


def test_another_global_batch_is_refused_with_overrides_that_keep_it(earlier: Any) -> None:
    """Before the ranks of the other layout start, and by each of them under torchrun; with the overrides both go on."""
    folder, layout = Path(earlier.checkpoints.checkpoints_path).parent, ("parallelism.dp=2", "parallelism.tp=2")
    wrong = tiny_config(folder, RATES, "tokens.train_steps=8", *layout)
    for start in (partial(name_before_start, wrong, run_folders(wrong)), Checkpoints(wrong).start):
        with pytest.raises(InputError, match="has a global batch of 4 sequences, this config has 8 ") as refused:
            start()
    told = re.findall(r"tokens\.\w+=\d+", str(refused.value))
    right = tiny_config(folder, RATES, "tokens.train_steps=8", *layout, *told)
    assert (right.tokens.micro_batch_size, right.global_batch_size) == (2, 4)
    assert name_before_start(right, run_folders(right))[1] == folder / "logs" / "tiny" / "ranks"
    assert Checkpoints(right).start().step == 8


@pytest.mark.parametrize("folder", ["model", "optimizer"])
def test_a_damaged_checkpoint_of_another_run_is_refused(folder: str, earlier: Any, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(Path(earlier.checkpoints.checkpoints_path) / "4", damaged)
    (file,) = (damaged / folder).glob("*.safetensors")
    flip_a_byte(file)
    config = start_from(earlier, tmp_path, f"checkpoints.resume_checkpoint_path={damaged}")
    with pytest.raises(InputError, match=f"{file} is damaged: its checksum is "):
        train_quietly(config)


def test_another_architecture_is_an_error_that_names_the_tensor(
    earlier: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what hooks hold is let go, as after any run."""
    closed: list[int] = []
    monkeypatch.setattr(user_parts.Recorder, "on_close", lambda self, run: closed.append(run.step))
    changes = ("model.model_config.intermediate_size=32", "general.hooks=[support.user_parts.Recorder]")
    with pytest.raises(InputError, match=r"model\.layers\.\d.*mlp.*weight"):
        train_quietly(start_from(earlier, tmp_path, *changes))
    assert closed == [0]


# ---- what is saved, and kept -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), [2, 4, 6, 7]),
        (("checkpoints.save_final_state=false", "checkpoints.save_initial_state=true"), [0, 2, 4, 6]),
        (("checkpoints.keep_last=1", "checkpoints.keep_every=4"), [4, 7]),
    ],
)
def test_the_checkpoints_that_a_run_leaves(keys: tuple[str, ...], expected: list[int], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "tokens.train_steps=7", "checkpoints.checkpoint_interval=2", *keys)
    train_quietly(config)
    assert steps_saved(tmp_path / "checkpoints") == expected


def test_the_initial_state_is_that_of_the_rules_and_a_start_from_it_is_a_start(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "checkpoints.save_initial_state=true", "tokens.train_steps=3")
    train_quietly(config)
    assert equal_bits(saved_weights(tmp_path / "checkpoints" / "0"), train_start(config))
    final, logged = saved_weights(tmp_path / "checkpoints" / "3"), losses(config)
    shutil.rmtree(tmp_path / "checkpoints" / "3")  # as if it had been killed before the first step was done
    (tmp_path / "checkpoints" / "latest.txt").write_text("0")
    train_quietly(config)
    assert equal_bits(saved_weights(tmp_path / "checkpoints" / "3"), final)
    assert losses(config) == logged


def test_saving_at_the_last_step_is_done_once(tmp_path: Path) -> None:
    _, said = train_and_listen(tiny_config(tmp_path, "tokens.train_steps=4", "checkpoints.checkpoint_interval=2"))
    assert said.count("Saved checkpoint at") == 2


def test_settings_that_the_weights_were_not_trained_with_are_warned_of(earlier: Any, tmp_path: Path) -> None:
    """No shape shows them, and nothing fails: the run starts with the weights, and its loss is too high."""
    from kenotron.interop import to_hf

    at_4 = Path(earlier.checkpoints.checkpoints_path) / "4"
    to_hf(at_4, tmp_path / "hf", dtype="float32")
    changed = "model.model_config.rope_theta=5e5", "model.model_config.z_loss_enabled=true", "tokens.train_steps=5"
    initial = "checkpoints.save_initial_state=true"
    for path, key in (
        (tmp_path / "hf", "model.init_method.path"),
        (at_4, "model.init_method.path"),
        (at_4, "checkpoints.resume_checkpoint_path"),
    ):
        folder = tmp_path / f"{key} {path.name}"
        source = f"model.init_method={{path: '{path}'}}" if "init" in key else f"{key}={path}"
        _, said = train_and_listen(tiny_config(folder, RATES, source, initial, *changed))
        if "init" in key:
            assert same_saved(folder / "checkpoints" / "0", at_4)
        (line,) = [line for line in said.splitlines() if "were trained with" in line]
        changed_key = "model.model_config.rope_theta is 500000.0"
        assert line == f"warning: {changed_key}, but the weights in {path} were trained with 10000.0"


def test_checkpoints_of_nanotron_are_not_taken_for_none(tmp_path: Path) -> None:
    """The run would start at step 0 in the folder of one that is far ahead."""
    config = tiny_config(tmp_path)
    (config.checkpoint_folder / "4").mkdir(parents=True)
    (config.checkpoint_folder / "4" / "checkpoint_metadata.json").write_text("{}")
    with pytest.raises(InputError, match=r"^checkpoints\.checkpoints_path: .* holds checkpoints of nanotron"):
        Checkpoints(config).start()
    assert Checkpoints(config, fresh=True).start().path is None


# ---- starting over -----------------------------------------------------------------------------------------


def test_fresh_loses_nothing_however_often(tmp_path: Path) -> None:
    config = train_quietly(tiny_config(tmp_path)).config
    first = losses(config)
    for _ in range(3):
        train_quietly(config, fresh=True)
    assert losses(config) == first
    kept = [path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("replaced-")]
    assert [steps_saved(path) for path in kept] == [[3], [3], [3]]
    logs = sorted((tmp_path / "logs" / "tiny").glob("replaced-*/metrics.jsonl"))
    assert [len(path.read_text().splitlines()) for path in logs] == [3, 3, 3]


def test_fresh_also_sets_aside_what_a_killed_save_left_almost_done(tmp_path: Path) -> None:
    config = train_quietly(tiny_config(tmp_path)).config
    root = tmp_path / "checkpoints"
    (root / "3").rename(root / "3.tmp-0123abcd")  # whole, but killed before its rename
    _, said = train_and_listen(config, fresh=True)
    assert "Training from step 1 to 3: " in said


def test_with_every_checkpoint_damaged_the_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new run would replace them one by one, and a queue would have begun it with nobody looking."""
    config = tiny_config(tmp_path, "checkpoints.checkpoint_interval=1")
    train_quietly(config)
    final = saved_weights(tmp_path / "checkpoints" / "3")
    for step in (1, 2, 3):
        victim = next((tmp_path / "checkpoints" / str(step) / "model").glob("*.safetensors"))
        victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"checkpoints is intact, .* step 0 with --fresh"):
        kn.train(config)
    said = capsys.readouterr().out
    for step in (1, 2, 3):
        assert f"warning: skipping checkpoint {step}: {tmp_path}/checkpoints/{step}/model" in said
    assert len(losses(config)) == 3  # nor are the metrics set aside
    train_quietly(config, fresh=True)
    assert equal_bits(saved_weights(tmp_path / "checkpoints" / "3"), final)
    (kept,) = (tmp_path / "checkpoints").glob("replaced-*")
    assert steps_saved(kept) == [1, 2, 3]


def test_a_folder_of_something_else_is_no_damaged_checkpoint(tmp_path: Path) -> None:
    notes = tmp_path / "checkpoints" / "2026" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("of another program")
    train_quietly(tiny_config(tmp_path))
    assert steps_saved(tmp_path / "checkpoints") == [3, 2026]
    assert notes.read_text() == "of another program"
