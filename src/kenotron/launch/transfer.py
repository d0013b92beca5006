"""Does a parametrization hold for a config's own model? `kenotron mup check` measures it at several sizes.

    over width 64, 128, 256       |x|     moved
    model.layers.*.mlp.up_proj    -0.02   -0.04     slopes of log2 over log2 of the width: 0 is what µP promises
    model.layers.*.mlp.down_proj  -0.08   -0.09
    lm_head                       -0.12   -0.05     logits begin smaller in a wider model, and are allowed to

`coordinates` is the coordinate check of Tensor Programs V (arXiv 2203.03466): a few steps on one batch, then the mean
|x| of every module's output, and of how far it moved. The steps have a quarter of the config's learning rate: the rules
are those of small steps, and large ones show that widths are finite. `rates` trains in full, over a grid of rates.
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

TOLERANCE = 0.25  # of a slope; the standard parametrization is off by more than 0.5 somewhere
RATE = "optimizer.learning_rate_scheduler.learning_rate"
SCALED = ("intermediate_size", "num_attention_heads", "num_key_value_heads")  # with the width; head_dim stays
ALONE = ("parallelism={}", "optimizer.zero_stage=0", "model.compile=false", "model.kernels=null", "general.hooks=null")


class Sweep(NamedTuple):
    """A `kind` of parametrization over an `axis`, width or depth, at `sizes` that are multiples of the base model's.

    `outputs`: ``[sizes, modules, 2]``, log2 of the mean |x| of a module's output and of how far it moved. `branches`
    are the modules that write into the residual stream, which CompleteP divides by depth.
    """

    kind: str
    axis: str
    sizes: Sequence[int]
    modules: Sequence[str]
    branches: Sequence[str]
    outputs: np.ndarray[Any, Any]

    @property
    def slopes(self) -> np.ndarray[Any, Any]:
        """``[modules, 2]``: the powers of the size by which the outputs and their moves grow."""
        return np.polyfit(np.log2(self.sizes), self.outputs.reshape(len(self.sizes), -1), 1)[0].reshape(-1, 2)

    @property
    def promised(self) -> np.ndarray[Any, Any]:
        """``[modules, 2]``: whether each slope is as the parametrization promises."""
        most = np.array([[-1.0 if self.axis == "depth" and name in self.branches else 0.0] for name in self.modules])
        least = most - [[0.5 if name == "lm_head" else 0.0] for name in self.modules]
        return (least - TOLERANCE <= self.slopes) & (self.slopes <= most + TOLERANCE)


def coordinates(
    config: Config, sizes: Sequence[int] = (1, 2, 4), steps: int = 3, seeds: int = 3, say: Report = print
) -> list[Sweep]:
    """Sweeps over widths, with completep also over depths: the config's parametrization, then the standard one.

    Raises InputError for a config without a parametrization, and for one whose heads or MLP do not fit a width.
    """
    config, base = _checked(config)
    sweeps = list(product(["width", "depth"][: 2 if base.kind == "completep" else 1], (base.kind, "standard")))
    rate = config.optimizer.learning_rate_scheduler.learning_rate / 4
    small = f"optimizer.learning_rate_scheduler={{learning_rate: {rate}, lr_decay_style: constant}}"
    config = load(config, [small, f"tokens.train_steps={steps}"])
    shapes = [at_size(config, base, kind, **{axis: size}) for (axis, kind), size in product(sweeps, sizes)]
    runs = [load(shape, [f"general.seed={seed}"]) for shape in shapes for seed in range(1, seeds + 1)]
    found = _each(runs, _outputs, say)
    modules, branches = list(found[0]), family_of(config.model.decoder).plan.row
    logs = np.log2([[each[module] for module in modules] for each in found])
    means = logs.reshape(len(sweeps), len(sizes), seeds, len(modules), 2).mean(2)
    return [Sweep(kind, axis, sizes, modules, branches, mean) for (axis, kind), mean in zip(sweeps, means)]


def table(*sweeps: Sweep) -> Iterator[str]:
    """A line for each kind of module with the slopes of both, ! beside one that is not promised, and the verdicts."""
    titles = "".join(f"{each.kind:>11} {what:6}" for each in sweeps for what in ("|x|", "moved"))
    yield f"{f'over {sweeps[0].axis}':41}{titles}".rstrip()
    for number, module in enumerate(sweeps[0].modules):
        cells = [pair for each in sweeps for pair in zip(each.slopes[number], each.promised[number])]
        shown = (f"{slope:+15.2f} {' ' if promised else '!'} " for slope, promised in cells)
        yield f"{module:41}{''.join(shown)}".rstrip()
    for each in sweeps:
        wrong = (~each.promised).any(1).sum()
        found = f"does not hold: {wrong} of {len(each.modules)} kinds of modules" if wrong else "holds"
        yield f"{each.kind} over {each.axis}: {found}"


class Grid(NamedTuple):
    """The `losses` of whole runs at `size` times base_width, by learning rate."""

    kind: str
    size: int
    losses: dict[float, float]

    @property
    def best(self) -> float:
        """The minimum, over log2 of the rate, of the parabola through the lowest loss and two neighbours on each side.

        A rate at an end of the grid is itself the best one.
        """
        tried = sorted(self.losses)
        at = tried.index(min(tried, key=self.losses.__getitem__))
        if at in (0, len(tried) - 1):
            return tried[at]
        near = tried[max(at - 2, 0) : at + 3]
        bend, slope, _ = np.polyfit(np.log2(near), [self.losses[rate] for rate in near], 2)
        return float(2 ** (-slope / (2 * bend)))


def rates(config: Config, largest: int = 4, say: Report = print) -> list[Grid]:
    """Whole runs over learning rates: of the parametrization at base_width and `largest` times it, of the standard one.

    The grid has steps of sqrt 2 around the config's. Raises as `coordinates`, and if that is not near the first best.
    """
    config, base = _checked(config)
    tried = [2 ** (half / 2) * config.optimizer.learning_rate_scheduler.learning_rate for half in range(-4, 5)]
    cases = [(base.kind, 1), (base.kind, largest), ("standard", largest)]
    runs = [load(at_size(config, base, *case), [f"{RATE}={rate}"]) for case in cases for rate in tried]
    losses = iter(_each(runs, _last_loss, say))
    grids = [Grid(*case, dict(zip(tried, losses))) for case in cases]
    if (best := grids[0].best) in (tried[0], tried[-1]):
        raise InputError(f"{RATE}: expected one near the best of base_width, found {tried[4]}; {best:.4g} is better")
    return grids


def at_size(config: Config, base: Parametrization, kind: str, width: int = 1, depth: int = 1) -> Config:
    """`config` at multiples of the `base` model's width and depth; with another `kind` without its parametrization.

    Raises InputError if a number of heads, or the MLP's width, would not be whole.
    """
    shape, wide = config.model.decoder, base.base_width * width
    keys = {"hidden_size": wide, "num_hidden_layers": base.base_depth * depth}
    for name in (name for name in SCALED if getattr(shape, name, None)):
        keys[name], rest = divmod(getattr(shape, name) * wide, shape.hidden_size)
        if rest:
            raise InputError(f"model.model_config.{name}: expected a number that is whole at hidden_size {wide}, too")
    overrides = [f"model.model_config.{name}={value}" for name, value in keys.items()]
    return load(config, overrides if kind == base.kind else [*overrides, "model.parametrization=null"])


def _checked(config: Config) -> tuple[Config, Parametrization]:
    """`config` on one rank with its architecture, and its parametrization."""
    base = config.model.parametrization
    if base is None or not isinstance(config.model.init_method, RandomInit):
        raise InputError("model: expected a parametrization to check, {kind: …}, and init_method {std: …}")
    return load(resolve_architecture(config), [*same_batch_overrides(config, 1), *ALONE]), base


def _each(runs: Sequence[Config], measure: Callable[[Run], Any], say: Report) -> list[Any]:
    """What `measure` returns for each of the `runs`, which begin at step 0 and leave no files."""
    console.logger.setLevel("ERROR")
    found = []
    with progress("Training", len(runs), say) as update:
        for config in runs:
            run = build.build_run(config, mesh.Mesh(), device.best_device())
            found.append(measure(run))
            close(run)
            update(len(found))
    return found


def _last_loss(run: Run) -> float:
    """The mean loss of the last ten steps; of a run that diverged, that of a model that knows nothing."""
    loss = np.mean(_train(run, lambda number: number)[-10:])
    return float(loss) if np.isfinite(loss) else math.log(run.model.config.vocab_size)


def _train(run: Run, batch_of: Callable[[int], int]) -> list[float]:
    """The losses of all steps, each on the batch of step `batch_of` its number."""
    losses = []
    while not run.finished:
        losses.append(step.train_step(run, list(run.data.batch(batch_of(run.step + 1), 0, 1))).lm_loss)
        run.step += 1
    return losses


def _outputs(run: Run) -> dict[str, Any]:
    """Kind of module → the mean |x| of its output after training on the first batch, and of how far that moved."""
    start = _forward(run)
    _train(run, lambda number: 1)
    found: dict[str, list[list[float]]] = {}
    for name, x in _forward(run).items():
        found.setdefault(_kind(name), []).append([each.abs().mean().item() for each in (x, x - start[name])])
    return {kind: np.mean(each, 0) + 1e-30 for kind, each in found.items()}  # zeros have no logarithm


def _forward(run: Run) -> dict[str, Tensor]:
    """The output of every layer, and of every module with parameters of its own, on the first micro-batch."""
    found: dict[str, Tensor] = {}
    batch = step.to_device(run.data.batch(1, 0, 1)[0], run)
    with ExitStack() as hooks, torch.no_grad():
        for name, module in run.model.named_modules():
            if _kind(name) == run.model.plan.blocks or [*module.parameters(recurse=False)]:
                keep = lambda module, inputs, output, name=name: found.update({name: output.float()})  # noqa: E731
                hooks.callback(module.register_forward_hook(keep).remove)
        run.model(batch.tokens, batch.ctx)
    return found


def _kind(name: str) -> str:
    return re.sub(r"\.\d+", ".*", name)
