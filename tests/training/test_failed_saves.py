"""A save that cannot be done ends the run with exit code 1 and one line; what was saved before stays good."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.checkpoint_states import flip_a_byte
from support.nursery import Nursery
from support.tiny_run import Shell, saved_weights, tiny_config, tiny_dict, train_quietly


def test_a_disk_without_room_ends_the_run_and_leaves_the_last_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    """No file may grow beyond 20 kB from step 3 on: too little for a checkpoint, enough for the logs."""
    content = tiny_dict(tmp_path)
    content["general"]["hooks"] = [{"path": "support.user_parts.LittleRoom", "kwargs": {"step": 3, "bytes": 20_000}}]
    content["checkpoints"]["checkpoint_interval"] = 2
    content["tokens"]["train_steps"] = 6
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    finished = nursery.run("train", file, folder=tmp_path)
    assert finished.code == 1
    assert finished.stderr.startswith("error: step 4: cannot write ")
    assert "File too large" in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()] == ["2"]
    assert saved_weights(tmp_path / "checkpoints" / "2")

    again = nursery.run("train", file, "general.hooks=null", folder=tmp_path)
    assert (again.code, again.stderr) == (0, "")
    assert "Training from step 3 to " in again.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("checkpoints", "checkpoints.checkpoints_path: cannot create {}/checkpoints: File exists\n"),
        ("logs", "logging.log_dir: cannot write to "),
    ],
)
def test_a_folder_that_is_a_file_is_said_in_one_line_that_names_the_key(
    name: str, said: str, shell: Shell, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tiny_dict(tmp_path)))
    (tmp_path / name).write_text("not a folder")
    code, printed, errors = shell("train", file)
    assert code == 2
    assert errors.startswith(f"error: {said.format(tmp_path)}")
    assert errors.count("\n") == 1
    assert "number of parameters" not in printed  # said before the model is built


def test_with_sanity_checks_a_checkpoint_is_read_back_before_earlier_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
