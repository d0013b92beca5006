"""A loss or gradient that is not finite changes nothing, is counted, and stops the run when it goes on and on."""

import json
import math
import re
from pathlib import Path

import pytest

from kenotron.config.errors import RunFailed
from support.tiny_run import equal_bits, losses, metrics, saved_weights, tiny_config, train_and_listen, train_quietly


def poison(steps: list[int], value: str = ".nan") -> str:
    return f"general.hooks=[{{path: support.user_parts.Poison, kwargs: {{steps: {steps}, value: {value}}}}}]"


EVERY_STEP = "checkpoints.checkpoint_interval=1"


@pytest.mark.parametrize("host_decides", [True, False])
@pytest.mark.parametrize(("value", "dtype"), [(".nan", "float32"), (".inf", "bfloat16")])
def test_a_poisoned_gradient_changes_no_bit(
    host_decides: bool, value: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not host_decides:  # as fused Adam does on a GPU
        monkeypatch.setattr("kenotron.optim.clip.reads_are_free", lambda tensor: False)
    config = tiny_config(tmp_path, poison([2], value), EVERY_STEP, f"model.dtype={dtype}", "tokens.train_steps=4")
    _, said = train_and_listen(config)
    steps = [(step["iteration"], step["skipped"]) for step in metrics(config)]
    assert steps == [(1, False), (2, True), (3, False), (4, False)]
    assert metrics(config)[1]["grad_norm"] is None
    assert math.isfinite(losses(config)[1])
    text = (tmp_path / "logs" / "tiny" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text  # which is not JSON
    for part in ("model", "optimizer"):
        before, after, later = (saved_weights(tmp_path / "checkpoints" / str(k), part) for k in (1, 2, 3))
        assert equal_bits(before, after), part
        assert not equal_bits(after, later), part
    (warning,) = (line for line in said.splitlines() if "skipped" in line)
    assert re.match("warning: step 2 skipped.*1 skipped so far", warning)


def test_the_next_step_is_the_one_that_would_have_come_without_the_skipped_one(tmp_path: Path) -> None:
    """Nothing of the bad gradient stays behind: the step after it starts from the same weights with fresh gradients."""
    sgd = ("optimizer.optimizer_factory={name: sgd}", "optimizer.clip_grad=null")
    changes = (EVERY_STEP, "tokens.train_steps=3", *sgd)
    poisoned = train_quietly(tiny_config(tmp_path / "poisoned", poison([2]), *changes))
    clean = train_quietly(tiny_config(tmp_path / "clean", *changes))
    assert losses(poisoned.config)[:2] == losses(clean.config)[:2]
    # By hand: the weights of step 1 minus the rate times the gradient of the third batch there.
    from kenotron.training.step import forward_backward

    before = saved_weights(tmp_path / "poisoned" / "checkpoints" / "1")
    after = saved_weights(tmp_path / "poisoned" / "checkpoints" / "3")
    for name, parameter in clean.model.named_parameters():
        parameter.data.copy_(before[name])
    batches = clean.data.batch(3)
    forward_backward(clean, batches, 1 / sum(int((b.labels != -100).sum()) for b in batches))
    for name, parameter in clean.model.named_parameters():
        assert parameter.grad is not None
        expected = before[name] * (1 - 0.01 * 0.1) - 0.01 * parameter.grad
        assert (after[name] - expected).abs().max() < 1e-7


def test_the_run_fails_after_the_allowed_number_in_a_row(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, poison([2, 3, 4]), "optimizer.skip_nonfinite_steps=2", "tokens.train_steps=9")
    with pytest.raises(RunFailed, match=r"step 4: .*3 non-finite steps in a row.*skip_nonfinite_steps allows 2"):
        train_quietly(config)
    assert [step["skipped"] for step in metrics(config)] == [False, True, True, True]
    weight = "general.hooks=[{path: support.user_parts.PoisonWeight, kwargs: {step: 2}}]"
    steps = ("optimizer.skip_nonfinite_steps=3", "tokens.train_steps=50")
    with pytest.raises(RunFailed, match=r"^step 6: lm_loss nan.*4 non-finite steps in a row"):
        train_quietly(tiny_config(tmp_path / "weight", weight, *steps))


def test_a_good_step_between_starts_the_count_anew(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, poison([2, 3, 5, 6]), "optimizer.skip_nonfinite_steps=2", "tokens.train_steps=7")
    _, said = train_and_listen(config)
    assert [step["skipped"] for step in metrics(config)] == [False, True, True, False, True, True, False]
    assert "(4 skipped so far)" in said


def test_the_count_survives_a_restart(tmp_path: Path) -> None:
    allowed = "optimizer.skip_nonfinite_steps=3"
    train_quietly(tiny_config(tmp_path, poison([3, 4]), allowed, "tokens.train_steps=4"))
    manifest = json.loads((tmp_path / "checkpoints" / "4" / "manifest.json").read_text())
    assert manifest["state"]["hooks"]["kenotron.training.guards.NonFiniteGuard"] == {"in_a_row": 2, "total": 2}
    with pytest.raises(RunFailed, match=r"step 6: .*4 non-finite steps in a row"):
        train_quietly(tiny_config(tmp_path, poison([5, 6]), allowed, "tokens.train_steps=9"))


def test_no_checkpoint_is_pruned_while_steps_are_being_skipped(tmp_path: Path) -> None:
    for hook, steps, kept in ((poison([3, 4, 5]), 5, ["2", "3", "4", "5"]), (poison([]), 6, ["6"])):
        train_quietly(tiny_config(tmp_path, hook, EVERY_STEP, "checkpoints.keep_last=1", f"tokens.train_steps={steps}"))
        assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == kept
