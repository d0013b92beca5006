"""A save that cannot be done ends the run with exit code 1 and one line; what was saved before stays good."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_states import flip_a_byte
from support.nursery import Nursery
from support.tiny_run import Shell, saved_weights, tiny_config, tiny_yaml, train_quietly


def test_a_disk_without_room_ends_the_run_and_leaves_the_last_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    """No file may grow beyond 20 kB from step 3 on: too little for a checkpoint, enough for the logs."""
    given = ("train", tiny_yaml(tmp_path), "checkpoints.checkpoint_interval=2", "tokens.train_steps=6")
    hook = "general.hooks=[{path: support.user_parts.LittleRoom, kwargs: {step: 3, bytes: 20000}}]"
    finished = nursery.run(*given, hook, folder=tmp_path)
    assert finished.code == 1
    assert re.fullmatch("error: step 4: cannot write .*File too large.*\n", finished.stderr)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["2"]
    assert saved_weights(tmp_path / "checkpoints" / "2")

    again = nursery.run(*given, folder=tmp_path)
    assert (again.code, again.stderr) == (0, "")
    assert "Training from step 3 to " in again.stdout


def test_a_folder_that_is_a_file_is_named_with_its_key(shell: Shell, tmp_path: Path) -> None:
    for name, said in (
        ("logs", "logging.log_dir: cannot write to "),
        ("checkpoints", f"checkpoints.checkpoints_path: cannot create {tmp_path}/checkpoints/checkpoints: File exists"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("not a folder")
        code, printed, errors = shell("train", tiny_yaml(tmp_path / name))
        assert code == 2
        assert errors.startswith(f"error: {said}")
        assert errors.count("\n") == 1
        assert "number of parameters" not in printed  # said before the model is built


def test_a_checkpoint_is_read_back_before_earlier_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kenotron.checkpoint import folders, saving
    from kenotron.config.errors import RunFailed

    keys = ("general.ignore_sanity_checks=false", "checkpoints.checkpoint_interval=1", "checkpoints.keep_last=1")
    save = saving.save

    def bad_disk(root: Path, step: int, **given: Any) -> Any:
        """What was written at step 2 reads back otherwise."""
        saved = save(root, step, **given)
        if step == 2:
            (victim,) = (saved.path / "model").glob("*.safetensors")
            flip_a_byte(victim)
        return saved

    monkeypatch.setattr(saving, "save", bad_disk)
    with pytest.raises(RunFailed, match=r"step 2: .*checkpoints/2/model/.*earlier checkpoints are as they were"):
        train_quietly(tiny_config(tmp_path, *keys))
    assert folders.verify(tmp_path / "checkpoints" / "1") == []
    monkeypatch.undo()
    train_quietly(tiny_config(tmp_path, *keys))
    assert folders.verify(tmp_path / "checkpoints" / "3") == []
