"""Weights, gradients and moments in bf16 (`accumulate_grad_in_fp32: false`): layouts, dtypes, resume."""

from pathlib import Path

import pytest
import torch

from kenotron.models import named_parameters
from kenotron.parallel.mesh import Mesh, axes, build_mesh
from kenotron.parallel.shards import local_tensor
from kenotron.planner.memory import plan_memory
from support.layout_runs import Problem, prepared, steps
from support.ranks import run_ranks
from support.tiny_run import equal_bits, losses, saved_weights, tiny_config, train_quietly

PURE = ("model.dtype=bfloat16", "optimizer.accumulate_grad_in_fp32=false")
ROUNDED = (*PURE, "optimizer.stochastic_rounding=true")
LAYOUTS = ("dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b", "cp=2")


def train_in_bf16(rank: int, layout: str, folder: Path, overrides: tuple[str, ...]) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step on one rank; all that is kept between steps is bf16."""
    config = Problem("bf16", overrides, steps=5).config(layout, folder)
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu") if layout else Mesh()
    with prepared(config, mesh) as run:
        results = steps(run)
        for name, parameter in named_parameters(*run.parts):
            moments = [value for value in run.optimizer.state[parameter].values() if value.dim() or not parameter.dim()]
            for kept in (parameter, *(each for each in moments if each.shape == parameter.shape)):
                assert local_tensor(kept.detach()).dtype == torch.bfloat16, name
        return [(result.lm_loss, result.grad_norm) for result in results]


@pytest.mark.cases(1)
@pytest.mark.parametrize("overrides", [PURE, ROUNDED], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "dp=2 zero=3 tp=2"])
def test_every_layout_trains_as_one_process_up_to_bf16(layout: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    expected = train_in_bf16(0, "", tmp_path / "alone", overrides)
    ranks = 4 if "zero=3 tp" in layout else 2
    for found in run_ranks(ranks, train_in_bf16, layout, tmp_path, overrides):
        for (loss, norm), (loss0, norm0) in zip(found, expected, strict=True):
            assert loss == pytest.approx(loss0, rel=4e-3)
            assert norm == pytest.approx(norm0, rel=4e-2)


@pytest.mark.parametrize("overrides", [PURE, ROUNDED], ids=["nearest", "stochastic"])
def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(overrides, tmp_path):
    whole = tiny_config(tmp_path / "whole", *overrides, "tokens.train_steps=6")
    train_quietly(whole)
    for steps_ in (3, 6):
        parts = tiny_config(tmp_path / "parts", *overrides, f"tokens.train_steps={steps_}")
        train_quietly(parts)
    assert losses(parts) == losses(whole)
    for part in ("model", "optimizer"):
        one, other = (saved_weights(each.checkpoint_folder / "6", part) for each in (whole, parts))
        assert equal_bits(one, other)
    assert {tensor.dtype for tensor in saved_weights(whole.checkpoint_folder / "6").values()} == {torch.bfloat16}


def test_the_rounding_decides_what_is_learned(tmp_path: Path) -> None:
    ways = {"nearest": PURE, "stochastic": ROUNDED, "masters": PURE[:1]}
    configs = [tiny_config(tmp_path / name, *way, "tokens.train_steps=6") for name, way in ways.items()]
    for config in configs:
        train_quietly(config)
    assert len({tuple(losses(config)) for config in configs}) == 3


def test_weights_and_moments_take_two_bytes_a_number(tmp_path: Path) -> None:
    (plan,) = plan_memory(tiny_config(tmp_path, *ROUNDED), None)
    assert plan.between_steps == pytest.approx(5968 * 6, rel=0.03)
