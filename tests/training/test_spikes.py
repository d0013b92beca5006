"""`optimizer.spikes`: with the guard a run is the one that never saw the batch that spikes."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kenotron.config import Config
from kenotron.config.errors import RunFailed
from kenotron.config.optimizer import Spikes
from kenotron.data import open_run
from kenotron.data.provenance import step_origins
from kenotron.observers.spikes import SpikeGuard
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.training.build import build_run
from kenotron.training.run import close
from kenotron.training.step import StepResult, train_step
from support.layout_runs import train_here
from support.ranks import run_ranks
from support.tiny_run import losses, metrics, numbers, same_saved, tiny_config, train_and_listen, train_quietly

GARBAGE, STEPS = 15, 26
GUARD = "optimizer.spikes={z_score: 4, window: 8, snapshot_every: 5, max_rollbacks: 1}"
SOURCE = "data_stages.0.data.dataset={{source: support.user_parts.counting_with_garbage, kwargs: {{garbage: {}}}}}"
DAMAGE = "{path: support.user_parts.Damage, kwargs: {step: 18}}"


def config(folder: Path, *overrides: str, garbage: bool = True) -> Config:
    """A run whose step 15 reads random tokens, and all others sequences that count."""
    folder.mkdir(exist_ok=True)
    changes = (f"tokens.train_steps={STEPS}", "optimizer.clip_grad=null", *overrides)
    with open_run(tiny_config(folder, SOURCE.format([]), *changes), report=lambda line: None) as data:
        indices = [origin.index for origin in step_origins(data, GARBAGE)]
    return tiny_config(folder, SOURCE.format(indices if garbage else []), *changes)


def kill(folder: Path, step: int, *keys: str) -> None:
    """A damaged run that ends by an error in `step`."""
    crash = f"{{path: support.user_parts.OnRank, kwargs: {{what: raise, rank: 0, step: {step}}}}}"
    with pytest.raises(RuntimeError, match="this hook is broken"):
        train_quietly(config(folder, *keys, f"general.hooks=[{DAMAGE}, {crash}]"))


def lines(found: Config) -> list[dict[str, Any]]:
    path = Path(found.logging.log_dir) / found.general.run / "skipped_steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_on(found: Config, steps: list[int]) -> Iterator[float]:
    """The reference: losses of training on the data of these steps, and on no other; nothing of the guard is used."""
    run = build_run(found, build_mesh(axes(found), 1, "cpu"), torch.device("cpu"))
    for step in steps:
        run.step = step - 1
        yield train_step(run, run.data.batch(step)).lm_loss
    close(run)


def test_a_batch_of_garbage_is_as_if_it_had_never_been_read(tmp_path: Path) -> None:
    guarded = config(tmp_path / "guarded", GUARD)
    _, said = train_and_listen(guarded)
    others = [step for step in range(1, STEPS + 1) if step != GARBAGE]
    found = {line["iteration"]: line for line in metrics(guarded)}
    assert [step for step, line in found.items() if line["skipped"]] == [GARBAGE]
    assert [found[step]["lm_loss"] for step in others] == list(trained_on(config(tmp_path / "reference"), others))
    # Without the guard the batch changes all that follows.
    bare = train_quietly(config(tmp_path / "bare")).config
    assert losses(bare)[:GARBAGE] == losses(guarded)[:GARBAGE]
    assert losses(bare)[GARBAGE - 1] > losses(bare)[0] > losses(bare)[GARBAGE - 2] + 1
    assert losses(bare)[GARBAGE] != losses(guarded)[GARBAGE]
    # The record names what was read.
    (line,) = lines(guarded)
    with open_run(guarded, report=lambda line: None) as data:
        assert [sample["index"] for sample in line["samples"]] == [each.index for each in step_origins(data, GARBAGE)]
    assert (line["iteration"], line["step"], line["stage"]) == (GARBAGE, GARBAGE, "only")
    assert f"warning: step {GARBAGE} is left out: lm_loss" in said


def test_damaged_weights_return_to_the_snapshot_also_in_a_run_that_is_killed(tmp_path: Path) -> None:
    """Step 15 reads garbage, and after step 18 a weight is wrong: 19 and 20 spike, and the weights of 17 return."""
    interval = "checkpoints.checkpoint_interval=12"
    guarded = train_quietly(config(tmp_path / "guarded", GUARD, interval, f"general.hooks=[{DAMAGE}]")).config
    trained = [step for step in range(1, STEPS + 1) if step not in (15, 18, 19, 20)]
    found = {line["iteration"]: line["lm_loss"] for line in metrics(guarded)}
    assert [found[step] for step in trained] == list(trained_on(config(tmp_path / "reference"), trained))
    assert [line["step"] for line in lines(guarded)] == [15, 19, 20, 18]
    assert lines(guarded)[-1]["iteration"] == 20
    # Killed after steps 22 and 25, it resumes from 12 and 24: nothing is different.
    killed = tmp_path / "killed"
    for step in (22, 25):
        kill(killed, step, GUARD, interval)
    again = train_quietly(config(killed, GUARD, interval, f"general.hooks=[{DAMAGE}]")).config
    assert numbers(killed) == numbers(tmp_path / "guarded")
    assert lines(again) == lines(guarded)
    end = [tmp_path / which / "checkpoints" / str(STEPS) for which in ("guarded", "killed")]
    assert same_saved(*end, "optimizer")


@pytest.mark.slow
def test_a_run_that_resumes_from_a_local_checkpoint_returns_to_the_same_weights(tmp_path: Path) -> None:
    """Damaged after step 18, it returns to step 14, where it was saved; a snapshot of its own would be that of 17."""
    keys = (GUARD, "checkpoints.checkpoint_interval=12", f"checkpoints.local={{path: {tmp_path}/shm, interval: 7}}")
    whole = train_quietly(config(tmp_path / "whole", *keys, f"general.hooks=[{DAMAGE}]")).config
    for step in (17, 22):
        kill(tmp_path / "killed", step, *keys)
    again = config(tmp_path / "killed", *keys, f"general.hooks=[{DAMAGE}]")
    _, said = train_and_listen(again)
    assert "Training from step 22 to" in said
    assert [line["step"] for line in lines(whole)] == [15, 19, 20, 15, 16, 17, 18]
    assert lines(again) == lines(whole)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


def test_weights_return_to_where_the_run_began_before_the_first_update(tmp_path: Path) -> None:
    """Two non-finite steps at the start: there is no optimizer state yet to return to."""
    poison = "general.hooks=[{path: support.user_parts.Poison, kwargs: {steps: [2, 3]}}]"
    guarded = train_quietly(config(tmp_path / "guarded", GUARD, poison, garbage=False)).config
    trained = list(range(4, STEPS + 1))
    found = {line["iteration"]: line["lm_loss"] for line in metrics(guarded)}
    assert [found[step] for step in trained] == list(trained_on(config(tmp_path / "reference", garbage=False), trained))


def test_too_many_returns_to_one_snapshot_end_the_run(tmp_path: Path) -> None:
    poison = "general.hooks=[{path: support.user_parts.Poison, kwargs: {steps: [7, 8, 9, 10, 11]}}]"
    guarded = config(tmp_path, GUARD, poison)
    with pytest.raises(RunFailed, match=r"^step 10: .*after 1 returns to the weights of step 5.*max_rollbacks"):
        train_quietly(guarded)


def trained_on_two(rank: int, folder: Path) -> None:
    """Rank 1 alone reads garbage."""
    layout = ("parallelism.dp=2", "tokens.micro_batch_size=2", "optimizer.zero_stage=3")
    train_here(config(folder, GUARD, *layout, f"general.hooks=[{DAMAGE}]"))


@pytest.mark.slow
def test_two_ranks_leave_the_same_steps_out_and_restore_their_shards(tmp_path: Path) -> None:
    run_ranks(2, trained_on_two, tmp_path)
    trained = [step for step in range(1, STEPS + 1) if step not in (15, 17, 18, 19, 20)]
    two = config(tmp_path, GUARD)
    assert [line["step"] for line in lines(two)] == [15, 19, 20, 17, 18]
    found = {line["iteration"]: line["lm_loss"] for line in metrics(two)}
    alone = list(trained_on(config(tmp_path / "alone", garbage=False), trained))
    assert [found[step] for step in trained] == pytest.approx(alone, abs=1e-5)


# ---- the rule, step by step ---------------------------------------------------------------------------------------


class Steps:
    """A guard and what it sees of a run: stages of ten steps; `Snapshot` is only counted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kenotron.observers.spikes.Snapshot", Copy)
        self.guard = SpikeGuard(Spikes(z_score=4, window=3, snapshot_every=10, max_rollbacks=2))
        self.run: Any = SimpleNamespace(
            step=0,
            config=tiny_config(folder),
            mesh=SimpleNamespace(world_size=1, is_first=False),
            device=torch.device("cpu"),
            data=SimpleNamespace(stage_at=lambda step: SimpleNamespace(start=(step - 1) // 10 * 10 + 1)),
        )
        self.guard.on_train_start(self.run)

    def do(self, loss: float, refused_elsewhere: bool = False) -> bool:
        """Whether the guard accepts a step of this loss."""
        accepted = math.isfinite(loss) and self.guard.accepts_update(self.run, loss, 1.0)
        self.run.step += 1
        skipped = refused_elsewhere or not accepted
        self.guard.after_step(self.run, StepResult(loss, 0.0, 1.0, 0.1, skipped, 1, 1.0))
        return accepted


class Copy:
    """A snapshot that remembers its step."""

    def take(self, run: Any) -> None:
        self.step = run.step

    def restore(self, run: Any) -> None:
        run.restored = self.step


def test_a_stage_is_not_judged_by_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a return."""
    steps = Steps(tmp_path, monkeypatch)
    assert all(steps.do(loss) for loss in (2.0, 2.1, 2.0, 2.1, 2.0, 2.1, 2.0, 2.1, 2.0, 2.1))  # a snapshot after these
    assert steps.do(9.0)  # the next stage, whose loss is another
    assert not any(steps.do(math.nan) for _ in range(2))
    assert steps.run.restored == 10
    assert all(steps.do(9.0) for _ in range(3))


def test_a_loss_that_falls_far_is_no_spike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(tmp_path, monkeypatch)
    assert all(steps.do(loss) for loss in (2.0, 2.1, 2.0, 0.5))  # 36 standard deviations below


def test_a_step_that_another_hook_refuses_is_no_spike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(tmp_path, monkeypatch)
    for loss in (2.0, 2.1, 2.0):
        steps.do(loss)
    assert all(steps.do(2.0, refused_elsewhere=True) for _ in range(4))
    assert not hasattr(steps.run, "restored")
    assert not steps.do(50.0)
    assert not steps.do(50.0)
    assert steps.run.restored == 0
