"""What a run's own checkpoints decide: whose others are needed, and when --fresh sets them aside."""

from pathlib import Path

import numpy as np
import pytest

from support.tiny_run import Shell, text_overrides, tiny_config, tiny_yaml, train_quietly, write_texts


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_yaml(tmp_path)


def test_a_run_with_checkpoints_of_its_own_needs_those_of_its_parent_no_more(tmp_path: Path, shell: Shell) -> None:
    train_quietly(tiny_config(tmp_path / "parent", "tokens.train_steps=1"))
    source = "checkpoints.resume_checkpoint_path=parent/checkpoints"
    assert shell("train", "tiny.yaml", source, "tokens.train_steps=2")[0] == 0
    (tmp_path / "parent").rename(tmp_path / "gone")
    assert shell("config", "check", "tiny.yaml", source, "tokens.train_steps=3")[0] == 0
    assert shell("train", "tiny.yaml", source, "tokens.train_steps=3")[0] == 0
    code, _, said = shell("config", "check", "tiny.yaml", source, "checkpoints.checkpoints_path=others")
    assert (code, "resume_checkpoint_path: no such file or folder: parent/checkpoints" in said) == (2, True)


def test_fresh_sets_nothing_aside_for_a_run_that_cannot_begin(tmp_path: Path, shell: Shell) -> None:
    assert shell("train", "tiny.yaml", "tokens.train_steps=2")[0] == 0
    code, _, said = shell("train", "tiny.yaml", "--fresh", "data_stages.0.data.dataset={tokens: nowhere}")
    assert (code, "no such file or folder: nowhere" in said) == (2, True)
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert shell("train", "tiny.yaml", "--fresh", "tokens.train_steps=1")[0] == 0
    (aside,) = (tmp_path / "checkpoints").glob("replaced-*")
    assert sorted(path.name for path in aside.iterdir()) == ["2", "latest.txt"]
    assert (tmp_path / "checkpoints" / "1").is_dir()


def test_a_stage_that_became_a_list_is_not_called_absent(tmp_path: Path, shell: Shell) -> None:
    text, texts = text_overrides(tmp_path), write_texts(tmp_path)
    assert shell("train", "tiny.yaml", "tokens.train_steps=1", *text)[0] == 0
    text[0] = f"data_stages.0.data.dataset={{text_files: [{texts}]}}"
    code, _, said = shell("train", "tiny.yaml", "tokens.train_steps=2", *text)
    assert (code, f"is '{texts}' there and something else in this config" in said) == (2, True)


def test_data_of_a_stage_that_is_over_may_be_gone(tmp_path: Path, shell: Shell) -> None:
    for name in ("one", "two"):
        np.save(f"{name}.npy", np.arange(600, dtype=np.uint16) % 50)
    stages = ", ".join(
        f"{{name: {name}, start_training_step: {start}, data: {{dataset: {{tokens: {name}.npy}}}}}}"
        for name, start in (("one", 1), ("two", 3))
    )
    for steps in ("2", "3"):
        run = ("tiny.yaml", f"data_stages=[{stages}]", f"tokens.train_steps={steps}")
        assert shell("config", "check", *run)[0] == 0
        assert shell("train", *run)[0] == 0
        Path("one.npy").unlink(missing_ok=True)
    code, _, said = shell("config", "check", *run, "checkpoints.checkpoints_path=others")
    assert (code, "no such file or folder: one.npy" in said) == (2, True)
