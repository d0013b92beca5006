"""The self-test passes on this machine, and fails where a resumed run is another one or a device computes wrongly."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kenotron.doctor import self_test

if TYPE_CHECKING:
    from kenotron.checkpoint.start import Start
    from kenotron.training import Run

pytestmark = pytest.mark.budget(10, reason="trains a tiny model twice")


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called in processes of its own is called here, where a fault can be put."""

    def call(function: Callable[..., Any], *arguments: object, **options: object) -> Any:
        with contextlib.redirect_stdout(io.StringIO()):
            return function(*arguments)

    monkeypatch.setattr(self_test, "call_limited", call)


def test_it_passes_here(tmp_path: Path) -> None:
    test = self_test.check_device(tmp_path, "cpu", {})
    assert test.passed, test.text
    assert "bit by bit" in test.text


def without_optimizer(run: Run) -> None:
    run.optimizer.state.clear()


def without_a_weight(run: Run) -> None:
    next(run.model.parameters()).data[0].zero_()


@pytest.mark.parametrize(
    ("fault", "where"), [(without_optimizer, "step 6: lm_loss"), (without_a_weight, "step 5: lm_loss")]
)
def test_a_resume_that_loses_something_is_found(
    fault: Callable[[Run], None], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kenotron.training import build

    restore = build.restore

    def with_fault(run: Run, start: Start) -> None:
        restore(run, start)
        if start.step:
            fault(run)

    monkeypatch.setattr(build, "restore", with_fault)
    test = self_test.check_device(tmp_path, "cpu", {})
    assert not test.passed
    assert test.text.startswith(where)  # the loss of step 5 comes before the first update without moments


def test_a_device_that_computes_wrongly_is_found() -> None:
    right = {1: {"lm_loss": self_test.FIRST_LOSS}, self_test.STEPS: {"lm_loss": self_test.LAST_LOSS}}
    assert self_test.wrong_losses(right) is None
    for step, loss in ((1, 5.6), (self_test.STEPS, 5.6), (1, float("nan"))):
        assert f"loss of step {step}" in (self_test.wrong_losses({**right, step: {"lm_loss": loss}}) or "")


@pytest.mark.parametrize(("other", "allowed", "same"), [(1.0, 0.0, True), (1.00001, 1e-4, True), (1.00001, 0.0, False)])
def test_runs_are_equal_within_what_is_allowed(other: float, allowed: float, same: bool) -> None:
    def lines(loss: float) -> dict[int, dict[str, float]]:
        return {step: {"lm_loss": loss, "grad_norm": 1.0} for step in range(1, self_test.STEPS + 1)}

    assert (self_test.difference(lines(1.0), lines(other), allowed) is None) == same
    assert self_test.difference(lines(1.0), {}, allowed) == "no lm_loss of step 5 in metrics.jsonl"
    assert self_test.difference(lines(float("nan")), lines(float("nan")), allowed)
    last = {self_test.STEPS: {"lm_loss": 1.0, "grad_norm": 2.0}}
    assert (self_test.difference(lines(1.0), lines(1.0) | last, allowed) or "").startswith("step 8: grad_norm 1.0 in")
