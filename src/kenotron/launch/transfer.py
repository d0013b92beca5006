"""Measure at several sizes whether a parametrization holds for a config's model: `kenotron mup check`.

    over width 64, 128, 256       |x|     moved
    model.layers.*.mlp.up_proj    -0.02   -0.04     slopes of log2 over log2 of the width: 0 is what µP promises
    model.layers.*.mlp.down_proj  -0.08   -0.09
    lm_head                       -0.12   -0.05     logits may start smaller in a wider model

`coordinates` is the coordinate check of Tensor Programs V (arXiv 2203.03466): it takes a few steps on one batch, and
returns the mean |x| of every module's output, and of the output's change. The steps have a quarter of the config's
learning rate, because the rules hold for small steps, and large ones show effects of finite width. `rates` does
complete runs over a grid of learning rates.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kenotron.config import Config, InputError, load
from kenotron.config.model import Parametrization, RandomInit
from kenotron.config.runs import same_batch_overrides
from kenotron.interop import resolve_architecture
from kenotron.models.family import family_of
from kenotron.parallel import device, mesh
from kenotron.text.progress import Report, progress
from kenotron.training import build, console, step
from kenotron.training.run import Run, close

TOLERANCE = 0.25  # of a slope; the standard parametrization has an error of more than 0.5 in some module
RATE = "optimizer.learning_rate_scheduler.learning_rate"
SCALED = ("intermediate_size", "num_attention_heads", "num_key_value_heads")  # scaled with the width; head_dim stays
ALONE = ("parallelism={}", "optimizer.zero_stage=0", "model.compile=false", "model.kernels=null", "general.hooks=null")


class Sweep(NamedTuple):
    """A `kind` of parametrization over an `axis`, width or depth, at `sizes` that are multiples of the base model's.

    `outputs` ``[sizes, modules, 2]`` has log2 of the mean |x| of a module's output, and of its change. `branches` are
    the modules that write to the residual stream, which CompleteP divides by depth.
    """

    kind: str
    axis: str
    sizes: Sequence[int]
    modules: Sequence[str]
    branches: Sequence[str]
    outputs: np.ndarray[Any, Any]

    @property
    def slopes(self) -> np.ndarray[Any, Any]:
        """The powers ``[modules, 2]`` of the size with which the outputs and their changes grow."""
        return np.polyfit(np.log2(self.sizes), self.outputs.reshape(len(self.sizes), -1), 1)[0].reshape(-1, 2)

    @property
    def promised(self) -> np.ndarray[Any, Any]:
        """Whether each slope ``[modules, 2]`` is as the parametrization promises."""
        most = np.array([[-1.0 if self.axis == "depth" and name in self.branches else 0.0] for name in self.modules])
        least = most - [[0.5 if name == "lm_head" else 0.0] for name in self.modules]
        return (least - TOLERANCE <= self.slopes) & (self.slopes <= most + TOLERANCE)


def coordinates(
    config: Config, sizes: Sequence[int] = (1, 2, 4), steps: int = 3, seeds: int = 3, say: Report = print
) -> list[Sweep]:
    """Return sweeps over widths, with completep also over depths: the config's parametrization, then the standard one.

    Raises InputError for a config without a parametrization, or whose heads or MLP do not fit a width.
    """
    config, base = _checked(config)
    sweeps = list(product(["width", "depth"][: 2 if base.kind == "completep" else 1], (base.kind, "standard")))
    rate = config.optimizer.learning_rate_scheduler.learning_rate / 4
    small = f"optimizer.learning_rate_scheduler={{learning_rate: {rate}, lr_decay_style: constant}}"
    config = load(config, [small, f"tokens.train_steps={steps}"])
    shapes = [at_size(config, base, kind, **{axis: size}) for (axis, kind), size in product(sweeps, sizes)]
    runs = [load(shape, [f"general.seed={seed}"]) for shape in shapes for seed in range(1, seeds + 1)]
    outputs = _measure(runs, _outputs, say)
    modules, branches = list(outputs[0]), family_of(config.model.decoder).plan.row
    logs = np.log2([[output[module] for module in modules] for output in outputs])
    means = logs.reshape(len(sweeps), len(sizes), seeds, len(modules), 2).mean(2)
    return [Sweep(kind, axis, sizes, modules, branches, mean) for (axis, kind), mean in zip(sweeps, means)]


def table(*sweeps: Sweep) -> Iterator[str]:
    """Yield a line for each kind of module with the slopes of all sweeps, ! after bad ones, and then the verdicts."""
    titles = "".join(f"{sweep.kind:>11} {title:6}" for sweep in sweeps for title in ("|x|", "moved"))
    yield f"{f'over {sweeps[0].axis}':41}{titles}".rstrip()
    for number, module in enumerate(sweeps[0].modules):
        pairs = [pair for sweep in sweeps for pair in zip(sweep.slopes[number], sweep.promised[number])]
        cells = (f"{slope:+15.2f} {' ' if promised else '!'} " for slope, promised in pairs)
        yield f"{module:41}{''.join(cells)}".rstrip()
    for sweep in sweeps:
        wrong = (~sweep.promised).any(1).sum()
        verdict = f"does not hold: {wrong} of {len(sweep.modules)} kinds of modules" if wrong else "holds"
        yield f"{sweep.kind} over {sweep.axis}: {verdict}"


class Grid(NamedTuple):
    """Learning rate → loss of complete runs at `size` times base_width."""

    kind: str
    size: int
    losses: dict[float, float]

    @property
    def best(self) -> float:
        """The best learning rate, by a parabola through the lowest loss and two neighbours on each side.

        The parabola is over log2 of the rate. If the lowest loss is at an end of the grid, its rate is the best.
        """
        grid = sorted(self.losses)
        lowest = grid.index(min(grid, key=self.losses.__getitem__))
        if lowest in (0, len(grid) - 1):
            return grid[lowest]
        near = grid[max(lowest - 2, 0) : lowest + 3]
        curvature, slope, _ = np.polyfit(np.log2(near), [self.losses[rate] for rate in near], 2)
        return float(2 ** (-slope / (2 * curvature)))


def rates(config: Config, largest: int = 4, say: Report = print) -> list[Grid]:
    """Do complete runs over learning rates: at base_width, at `largest` times it, and there with the standard kind.

    The grid has steps of sqrt 2 around the config's rate. Raises InputError as `coordinates` does, and if the config's
    rate is not near the best one at base_width.
    """
    config, base = _checked(config)
    grid = [2 ** (half / 2) * config.optimizer.learning_rate_scheduler.learning_rate for half in range(-4, 5)]
    cases = [(base.kind, 1), (base.kind, largest), ("standard", largest)]
    runs = [load(at_size(config, base, *case), [f"{RATE}={rate}"]) for case in cases for rate in grid]
    losses = iter(_measure(runs, _last_loss, say))
    grids = [Grid(*case, dict(zip(grid, losses))) for case in cases]
    best = grids[0].best
    if best in (grid[0], grid[-1]):
        raise InputError(f"{RATE}: expected one near the best of base_width, found {grid[4]}; {best:.4g} is better")
    return grids


def at_size(config: Config, base: Parametrization, kind: str, width: int = 1, depth: int = 1) -> Config:
    """Return `config` at multiples of the `base` model's width and depth, without parametrization for another `kind`.

    Raises InputError if a number of heads, or the MLP's width, would not be an integer.
    """
    model, hidden_size = config.model.decoder, base.base_width * width
    keys = {"hidden_size": hidden_size, "num_hidden_layers": (base.base_depth or model.num_hidden_layers) * depth}
    for name in filter(lambda name: getattr(model, name, None), SCALED):
        keys[name], rest = divmod(getattr(model, name) * hidden_size, model.hidden_size)
        if rest:
            expected = f"expected a number that is whole at hidden_size {hidden_size}, too"
            raise InputError(f"model.model_config.{name}: {expected}")
    overrides = [f"model.model_config.{name}={value}" for name, value in keys.items()]
    return load(config, overrides if kind == base.kind else [*overrides, "model.parametrization=null"])


def _checked(config: Config) -> tuple[Config, Parametrization]:
    """Return `config` for one rank with its architecture resolved, and its parametrization. Raises InputError."""
    base = config.model.parametrization
    if base is None or not isinstance(config.model.init_method, RandomInit):
        raise InputError("model: expected a parametrization to check, {kind: …}, and init_method {std: …}")
    return load(resolve_architecture(config), [*same_batch_overrides(config, 1), *ALONE]), base


def _measure(runs: Sequence[Config], measure: Callable[[Run], Any], say: Report) -> list[Any]:
    """Return the result of `measure` for each of the `runs`, which start at step 0 and leave no files."""
    console.logger.setLevel("ERROR")
    results = []
    with progress("Training", len(runs), say) as update:
        for config in runs:
            run = build.build_run(config, mesh.Mesh(), device.best_device())
            results.append(measure(run))
            close(run)
            update(len(results))
    return results


def _last_loss(run: Run) -> float:
    """Return the mean loss of the last ten steps, or the loss of a uniform prediction if the run diverged."""
    loss = np.mean(_train(run, lambda number: number)[-10:])
    return float(loss) if np.isfinite(loss) else math.log(run.model.config.vocab_size)


def _train(run: Run, batch_of: Callable[[int], int]) -> list[float]:
    """Train to the end and return the losses; step n reads the batch of step ``batch_of(n)``."""
    losses = []
    while not run.finished:
        losses.append(step.train_step(run, list(run.data.batch(batch_of(run.step + 1), 0, 1))).lm_loss)
        run.step += 1
    return losses


def _outputs(run: Run) -> dict[str, Any]:
    """Return kind of module → mean |x| of its output after training on the first batch, and of the output's change."""
    start = _forward(run)
    _train(run, lambda number: 1)
    sizes: dict[str, list[list[float]]] = {}
    for name, x in _forward(run).items():
        sizes.setdefault(_kind(name), []).append([x.abs().mean().item(), (x - start[name]).abs().mean().item()])
    return {kind: np.mean(pairs, 0) + 1e-30 for kind, pairs in sizes.items()}  # log2 of 0 is not finite


def _forward(run: Run) -> dict[str, Tensor]:
    """Return name → output of every layer and every module with its own parameters, on the first micro-batch."""
    outputs: dict[str, Tensor] = {}
    batch = step.to_device(run.data.batch(1, 0, 1)[0], run)
    with ExitStack() as hooks, torch.no_grad():
        for name, module in run.model.named_modules():
            if _kind(name) == run.model.plan.blocks or [*module.parameters(recurse=False)]:
                keep = lambda module, inputs, output, name=name: outputs.update({name: output.float()})  # noqa: E731
                hooks.callback(module.register_forward_hook(keep).remove)
        run.model(batch.tokens, batch.ctx)
    return outputs


def _kind(name: str) -> str:
    return re.sub(r"\.\d+", ".*", name)
