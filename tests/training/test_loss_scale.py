"""float16 with dynamic loss scaling: its numbers, overflows, resumes, and the same on every layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kenotron.config.errors import InputError, RunFailed
from kenotron.parallel.mesh import Mesh, axes, build_mesh
from kenotron.training import loss_scale
from kenotron.training.loss_scale import LossScale
from kenotron.training.step import StepResult, train_step
from support.layout_runs import Problem, prepared, problem_of_family, steps
from support.ranks import run_ranks
from support.tiny_run import metrics, same_saved, tiny_config, train_and_listen, train_quietly
from support.user_parts import Gradients

HALF = "model.dtype=float16"
OVERFLOWS = 2.0**30


def gradients(folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    keys = ("general.hooks=[support.user_parts.Gradients]", "optimizer.clip_grad=null", "tokens.train_steps=1")
    run = train_quietly(tiny_config(folder, *keys, *overrides))
    return next(hook for hook in run.hooks if isinstance(hook, Gradients)).first


def test_numbers_are_those_of_fp32_within_its_precision(tmp_path: Path) -> None:
    half, full = (tiny_config(tmp_path / name, *more) for name, more in (("half", (HALF,)), ("full", ())))
    train_quietly(half)
    train_quietly(full)
    for found, expected in zip(metrics(half), metrics(full), strict=True):
        assert found["lm_loss"] == pytest.approx(expected["lm_loss"], rel=1e-3)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
        assert found["loss_scale"] == 65536


def test_the_scale_keeps_gradients_that_float16_would_lose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With inputs that make gradients small, those without a scale are further from fp32's than those with one."""
    small = "model.init_method.std=0.0005"
    full = gradients(tmp_path / "full", small)
    errors = {}
    for scale in (1.0, 65536.0):
        monkeypatch.setattr(loss_scale, "INITIAL", scale)
        found = gradients(tmp_path / str(scale), small, HALF)
        errors[scale] = sum((found[name] - full[name]).norm() / full[name].norm().clamp(min=1e-12) for name in full)
    assert errors[65536.0] < 0.2 * errors[1.0]


def test_an_overflow_halves_the_scale_and_moves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", OVERFLOWS)
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    config = tiny_config(tmp_path, HALF, "tokens.train_steps=30", "optimizer.skip_nonfinite_steps=0")
    _, said = train_and_listen(config)
    lines = metrics(config)
    scales = [line["loss_scale"] for line in lines]
    skipped = sum("skipped: gradients overflow" in text for text in said.splitlines())
    assert scales[0] == OVERFLOWS
    assert skipped >= 5
    assert "step 1 skipped: gradients overflow; loss scale 1.07374e+09 → 5.36871e+08" in said
    for before, after in pairwise(scales):
        assert after in (before / 2, before, before * 2)
    assert any(after == before * 2 for before, after in pairwise(scales))  # after three good steps
    assert not (tmp_path / "logs" / "nonfinite_steps.jsonl").exists()


def test_what_is_not_finite_at_scale_1_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 4.0)
    rate = "optimizer.learning_rate_scheduler={learning_rate: 1.0e30}"
    with pytest.raises(RunFailed, match="non-finite steps in a row"):
        train_quietly(tiny_config(tmp_path, HALF, rate, "optimizer.skip_nonfinite_steps=2", "tokens.train_steps=20"))


def test_a_resumed_run_has_the_scale_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", OVERFLOWS)
    steps = ("tokens.train_steps=12", "checkpoints.checkpoint_interval=6", HALF)
    train_quietly(tiny_config(tmp_path / "whole", *steps))
    stop = "general.hooks=[{path: support.user_parts.StopAt, kwargs: {step: 6}}]"
    train_quietly(tiny_config(tmp_path / "parts", *steps, stop))
    monkeypatch.setattr(loss_scale, "INITIAL", 1.0)
    train_quietly(tiny_config(tmp_path / "parts", *steps))
    assert same_saved(*(tmp_path / name / "checkpoints" / "12" for name in ("whole", "parts")))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_losses_of_routers_are_scaled_as_well(family: str, tmp_path: Path) -> None:
    """Gradients of routers that have no other than the balance and z-loss, nearly: those of fp32."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    totals = {}
    for dtype, scale in (("float32", 1.0), ("float16", 64.0)):
        coefficients = ["model.model_config.router_aux_loss_coef=5.0", "model.model_config.router_z_loss_coef=5.0"]
        problem = problem_of_family(family, f"model.dtype={dtype}", *coefficients, "optimizer.clip_grad=null")
        with prepared(problem.config("", tmp_path / dtype), Mesh()) as run:
            run.loss_scale, found[dtype] = scale, {}
            results = steps(run, found[dtype])
            totals[dtype] = results[0].expert_loads.totals
    routers = [name for name in found["float32"] if name.endswith("mlp.gate.weight")]
    assert routers
    for name in routers:
        expected = found["float32"][name]
        assert (found["float16"][name] - expected).norm() < 0.05 * expected.norm(), name
    torch.testing.assert_close(totals["float16"], totals["float32"], rtol=1e-2, atol=1e-3)


PROBLEM = Problem("half", (HALF,), steps=8)


def train(rank: int, layout: str, folder: Path) -> list[StepResult]:
    """Steps with loss scaling that begins too high."""
    config = PROBLEM.config(layout, folder)
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    with prepared(config, mesh) as run:
        scaling, results = LossScale(), []
        scaling.scale = 2.0**26
        while not run.finished:
            scaling.before_step(run)
            batches = run.data.batch(run.step + 1, run.mesh.rank("batch"), run.mesh.degree("batch"))
            results.append(train_step(run, batches))
            run.step += 1
            scaling.after_step(run, results[-1])
            run.recorded.clear()
        return results


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "layout",
    ["dp=2 zero=0", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b", "cp=2"],
)
def test_all_ranks_decide_on_an_overflow_together(layout: str, tmp_path: Path) -> None:
    """Which scale overflows depends by a factor of two on how many tokens a product sums, and so on the layout."""
    alone = train(0, "", tmp_path)
    assert sum(result.overflow for result in alone) >= 3
    assert not alone[-1].overflow
    first, second = run_ranks(2, train, layout, tmp_path)
    assert [result.loss_scale for result in first] == [result.loss_scale for result in second]
    for found in (first, second):
        for one, other in zip(found, alone, strict=True):
            assert one.lm_loss == pytest.approx(other.lm_loss, rel=2e-3)
            assert one.loss_scale / other.loss_scale in (0.5, 1.0, 2.0)
            if one.finite and other.finite:
                assert one.grad_norm == pytest.approx(other.grad_norm, rel=2e-2)
        assert sum(result.finite for result in found) >= 2


def test_weights_in_float16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"accumulate_grad_in_fp32: expected true with model\.dtype float16"):
        tiny_config(tmp_path, HALF, "optimizer.accumulate_grad_in_fp32=false")
