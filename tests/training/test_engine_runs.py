"""Runs that save in the background: what they save and resume is what the engine `torch` makes of them."""

import errno
import time
from pathlib import Path
from typing import Any

import pytest

import kenotron as kn
from kenotron.checkpoint.engines.synchronous import SynchronousEngine
from kenotron.checkpoint.folders import list_checkpoints, newest_complete, verify
from kenotron.config import InputError
from kenotron.config.errors import RunFailed
from kenotron.observers import validation
from support.tiny_run import losses, same_saved, slow_copies, tiny_config, train_and_listen, train_quietly

EVERY_STEP = "checkpoints.checkpoint_interval=1"


def engine_config(folder: Path, engine: str, *more: str) -> Any:
    return tiny_config(folder, EVERY_STEP, f"checkpoints.checkpointing_engine={engine}", *more)


@pytest.mark.parametrize("engine", [pytest.param("async", marks=pytest.mark.slow), "datastates"])
def test_a_run_resumes_as_with_the_synchronous_engine(engine: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The ninth fault of DataStates-LLM was a resume that did not work."""
    slow_copies(monkeypatch)
    whole = train_quietly(tiny_config(tmp_path / "whole", EVERY_STEP, "tokens.train_steps=6")).config
    first = engine_config(tmp_path / "parts", engine, "tokens.train_steps=3")
    _, said = train_and_listen(first)
    for step in (1, 2, 3):
        assert f"Saved checkpoint at {tmp_path}/parts/checkpoints/{step}: " in said
    assert ", of which training waited " in said
    resumed = train_quietly(engine_config(tmp_path / "parts", engine, "tokens.train_steps=6")).config
    assert losses(resumed) == losses(whole)
    for step in range(1, 7):
        paths = [tmp_path / name / "checkpoints" / str(step) for name in ("parts", "whole")]
        for folder in ("model", "optimizer"):
            assert same_saved(*paths, folder), f"{folder} of step {step}"
    # and the engine `torch` goes on from what it saved
    other = train_quietly(tiny_config(tmp_path / "parts", EVERY_STEP, "tokens.train_steps=7"))
    assert other.step == 7


def test_averages_that_validate_a_skipped_step_are_not_what_a_save_copies(tmp_path: Path, monkeypatch: Any) -> None:
    """An update waits for copies of what it changes; the step without one has put other weights in their place, too."""
    slow_copies(monkeypatch, 0.4)  # amid the second of two validations, of 0.2 s each
    to_device = validation.to_device
    monkeypatch.setattr(validation, "to_device", lambda *given: time.sleep(0.05) or to_device(*given))
    skips = "general.hooks=[{path: support.user_parts.Poison, kwargs: {steps: [3]}}]"
    keys = (skips, "optimizer.ema_decay=0.9", "tokens.val_check_interval=3", "tokens.limit_val_batches=4")
    keys += ("checkpoints.checkpoint_interval=2",)
    for engine in ("torch", "datastates"):
        train_quietly(engine_config(tmp_path / engine, engine, *keys))
    assert same_saved(*(tmp_path / engine / "checkpoints" / "2" for engine in ("torch", "datastates")))


def full_disk(folder: Path, step: int) -> Any:
    hook = f"general.hooks=[{{path: training.test_local_checkpoints.LittleRoomAt, kwargs: {{steps: [{step}]}}}}]"
    return engine_config(folder, "datastates", "tokens.train_steps=4", hook)


def test_a_save_that_fails_in_the_background_is_an_error_in_the_log_and_the_run_goes_on(tmp_path: Path) -> None:
    run, said = train_and_listen(full_disk(tmp_path, 2))
    assert run.step == 4
    assert f"Checkpoint {tmp_path}/checkpoints/2 was not saved: cannot write " in said
    assert [entry.step for entry in list_checkpoints(tmp_path / "checkpoints")] == [1, 3, 4]


def test_a_last_save_that_fails_in_the_background_fails_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"step 4: cannot write .*earlier checkpoints are as they were"):
        train_quietly(full_disk(tmp_path, 4))
    assert newest_complete(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "3"


def test_a_last_save_that_cannot_even_begin_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has failed when `save` returns, so no save is in flight at the end of the run."""

    def begin(folder: Path, *_: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr("kenotron.checkpoint.engines.background.begin_folder", begin)
    with pytest.raises(RunFailed, match=r"step 3: .*No space left on device.*earlier checkpoints are as they were"):
        train_quietly(engine_config(tmp_path, "datastates"))


def test_a_run_that_fails_completes_the_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_copies(monkeypatch)
    config = engine_config(tmp_path, "datastates", "general.hooks=[training.test_engine_runs.Breaks]")
    with pytest.raises(RuntimeError, match="broken"):
        train_quietly(config)
    assert verify(tmp_path / "checkpoints" / "2") == []


class Breaks(kn.Hook):
    """Fails when step 2 is saved, or begun to be."""

    priority = -90

    def after_step(self, run: Any, result: Any) -> None:
        if run.step == 2:
            raise RuntimeError("broken")


class Counting(SynchronousEngine):
    """An engine of a user's own."""

    saved = 0

    def save(self, *given: Any) -> Any:
        self.saved += 1
        return super().save(*given)


def test_an_engine_of_ones_own_is_named_by_its_path(tmp_path: Path) -> None:
    run: Any = train_quietly(engine_config(tmp_path, "training.test_engine_runs.Counting"))
    assert run.checkpoints.engine.saved == 3
    with pytest.raises(InputError, match=r"checkpointing_engine: expected a dotted path .*datastates.*datastate"):
        train_quietly(engine_config(tmp_path / "wrong", "datastate"))
    with pytest.raises(InputError, match=r"expected a subclass of kenotron.checkpoint.engine.Engine, found 'trai"):
        train_quietly(engine_config(tmp_path / "wrong", "training.test_engine_runs.Breaks"))
