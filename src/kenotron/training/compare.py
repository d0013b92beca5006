"""Do two layouts of one config train the same model? Measured against what rounding alone does.

    A        the config as it is                    losses, gradient norms, gradients of step 1, weights at the end
    R1, R2   A, with the samples of every batch in another order: the same sums, added up in another order;
             for a run in bf16, R2 is A in fp32: a layout rounds more than sums there, so all of A's rounding counts
    B        the config on another layout

In exact arithmetic all four are equal. A and R differ by rounding, so how far they drift apart is what rounding does to
this model, on this machine, by this step. B may drift some times as far (`Reference.safety`); a wrong collective goes
a thousand times farther:

    step   lm_loss A   lm_loss B     |A - B|   rounding explains
       1   4.1271238   4.1271243    4.8e-07             4.1e-06      agrees
       1   4.1271238   4.1302110    3.1e-03             4.1e-06      differs
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kenotron import checkpoint
from kenotron.config import Config, dump
from kenotron.models import build, named_parameters
from kenotron.training.build import build_run
from kenotron.training.hooks import Hook
from kenotron.training.initial_weights import OpenWeights
from kenotron.training.run import Run, close
from kenotron.training.saved_state import model_tensors, optimizer_tensors
from kenotron.training.step import train_step

if TYPE_CHECKING:
    from kenotron.data import TokenBatch
    from kenotron.parallel.mesh import Mesh

FLOOR = 16 * torch.finfo(torch.float32).eps  # relative; for what happened to round the same way in A and R


@dataclass(frozen=True)
class Reference:
    """A run that differs from A by rounding alone: its name, overrides, order of samples, and how many times its
    distance from A a correct layout may have.
    """

    name: str
    overrides: tuple[str, ...]
    order: int
    safety: float


# Two other orders are a small sample of all, and a layout reorders sums over features too.
BACKWARDS = Reference("samples backwards", (), 1, 10.0)
ODD_FIRST = Reference("odd samples first", (), 2, 10.0)
# A and B round in bf16 at different places: twice as far in all, and the largest of many numbers.
IN_FP32 = Reference("in float32", ("model.dtype=float32",), 0, 4.0)


def references(config: Config) -> tuple[Reference, ...]:
    """The runs that show how far rounding alone moves `config`."""
    return (BACKWARDS, ODD_FIRST if config.model.dtype == "float32" else IN_FP32)


# ---- one run -----------------------------------------------------------------------------------------------


def record(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    *,
    steps: int,
    order: int,
    folder: str,
    open_weights: OpenWeights | None = None,
) -> None:
    """Train `steps` steps of `config` on this layout and write what is compared to `folder`. Every rank calls it."""
    from kenotron.training import console

    console.start_logging(config, mesh)
    console.logger.setLevel("WARNING")
    run = build_run(config, mesh, device, open_weights=open_weights)
    try:
        numbers = []
        run.hooks = [_KeepGradients(Path(folder))]
        while run.step < steps:
            batches = run.data.batch(run.step + 1, mesh.rank("batch"), mesh.degree("batch"))
            result = train_step(run, reordered(batches, order))
            run.hooks = []
            run.step += 1
            numbers.append([result.lm_loss, result.grad_norm])
        _save(run, Path(folder) / "weights", model_tensors(*run.parts), {"numbers": numbers})
    finally:
        close(run)


def reordered(batches: Sequence[TokenBatch], order: int) -> list[TokenBatch]:
    """The same samples in another order: 0 as they are, 1 backwards, 2 with the odd ones first."""
    if order == 0:
        return list(batches)
    rows = [np.arange(len(batch.tokens)) for batch in batches]
    if order == 1:
        return [batch[row[::-1]] for batch, row in reversed(list(zip(batches, rows)))]
    return [batch[np.concatenate((row[1::2], row[::2]))] for batch, row in zip(batches, rows)]


class _KeepGradients(Hook):
    """Saves the gradients of the first step, after clipping."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def before_update(self, run: Run) -> None:
        gradients = {
            f"state.{name}.gradient": parameter.grad
            for name, parameter in named_parameters(*run.parts)
            if parameter.grad is not None
        }
        _save(run, self.folder / "gradients", optimizer_tensors(gradients, run.parts), {})


def _save(run: Run, root: Path, tensors: dict[str, Any], state: dict[str, Any]) -> None:
    checkpoint.save(root, 1, model=tensors, optimizer=None, state=state, config_yaml=dump(run.config), model_config={})


# ---- the comparison ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """One number of both runs, and how far apart rounding alone may bring them."""

    name: str  # lm_loss or grad_norm
    step: int
    a: float
    b: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return abs(self.a - self.b) <= self.allowed  # false for NaN


@dataclass(frozen=True)
class ParameterDifference:
    """One parameter: norm of the difference of its gradients at step 1, or of its weights at the end, over A's norm."""

    name: str
    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """Everything that was compared; parameters in the order of the model."""

    numbers: list[Number]
    gradients: list[ParameterDifference]
    weights: list[ParameterDifference]

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        found: list[Number | ParameterDifference] = [*self.numbers, *self.gradients, *self.weights]
        return all(each.agrees for each in found)

    def first_parameter(self) -> ParameterDifference | None:
        """The first parameter whose gradient at step 1 is not explained by rounding."""
        return next((each for each in self.gradients if not each.agrees), None)

    def first_number(self) -> Number | None:
        """The first loss or gradient norm that is not explained by rounding."""
        return next((each for each in self.numbers if not each.agrees), None)


def compare(a: Path, rounding: Sequence[tuple[Path, float]], b: Path, config: Config) -> Comparison:
    """Compare what `record` wrote to the folders of A, of its references (with their safety), and of B."""
    with torch.device("meta"):
        names = [name for name, _ in named_parameters(build(config.model))]
    return Comparison(
        _numbers(_steps(a), [(_steps(folder), safety) for folder, safety in rounding], _steps(b)),
        _tensors([f"state.{name}.gradient" for name in names], "gradients", a, rounding, b),
        _tensors(names, "weights", a, rounding, b),
    )


Steps = list[list[float]]  # [lm_loss, grad_norm] of each


def _steps(folder: Path) -> Steps:
    return json.loads((folder / "weights" / "1" / "manifest.json").read_text())["state"]["numbers"]


def _numbers(a: Steps, others: Sequence[tuple[Steps, float]], b: Steps) -> list[Number]:
    found = []
    allowed = [0.0, 0.0]  # rounding errors grow from step to step: what was possible once stays possible
    for step, (ours, theirs) in enumerate(zip(a, b, strict=True)):
        for which, name in enumerate(("lm_loss", "grad_norm")):
            apart = (safety * abs(ours[which] - other[step][which]) for other, safety in others)
            allowed[which] = max(allowed[which], *apart)
            floor = FLOOR * abs(ours[which])
            found.append(Number(name, step + 1, ours[which], theirs[which], allowed[which] + floor))
    return found


def _tensors(
    names: Sequence[str], kind: str, a: Path, rounding: Sequence[tuple[Path, float]], b: Path
) -> list[ParameterDifference]:
    allowed = dict.fromkeys(names, 0.0)
    for other, safety in rounding:
        for name, difference in _differences(names, a / kind, other / kind):
            allowed[name] = max(allowed[name], safety * difference)
    usual = statistics.median(allowed.values())  # a small tensor may round the same way by luck
    return [
        ParameterDifference(
            name.removeprefix("state.").removesuffix(".gradient"),
            difference,
            max(allowed[name], usual) + FLOOR,
        )
        for name, difference in _differences(names, a / kind, b / kind)
    ]


def _differences(names: Sequence[str], a: Path, b: Path) -> Iterator[tuple[str, float]]:
    for name in names:
        ours, theirs = (checkpoint.read_tensors(at / "1", [name], verify=False)[name].double() for at in (a, b))
        scale = ours.norm().clamp(min=torch.finfo(torch.float64).tiny)
        yield name, float((ours - theirs).norm() / scale)


def draw(comparison: Comparison, path: Path, labels: tuple[str, str]) -> None:
    """A PNG: the losses of both runs, and how far apart they are beside what rounding explains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, apart = figure.subplots(1, 2)
    for name, colour in (("lm_loss", "tab:blue"), ("grad_norm", "tab:orange")):
        numbers = [each for each in comparison.numbers if each.name == name]
        steps = [each.step for each in numbers]
        curves.plot(steps, [each.a for each in numbers], color=colour, label=f"{name}, {labels[0]}")
        curves.plot(steps, [each.b for each in numbers], "--", color=colour, label=f"{name}, {labels[1]}")
        apart.plot(steps, [abs(each.a - each.b) for each in numbers], color=colour, label=f"{name}: difference")
        apart.plot(steps, [each.allowed for each in numbers], ":", color=colour, label=f"{name}: rounding explains")
    curves.set(xlabel="step", title="both layouts")
    apart.set(xlabel="step", yscale="log", title="how far apart")
    for axes in (curves, apart):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
