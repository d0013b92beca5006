"""Check whether two layouts of one config train the same model, up to rounding.

    A        the config itself
    R1 … R3  A, every initial weight changed at random by about PERTURBATION of its size
    B        the config on another layout

In exact arithmetic A and B are equal; on a computer they add up the same numbers in different orders. The R's measure
the effect of rounding on this model: every weight is off by 128 roundings in float32, by one in bfloat16, and B may
differ from A by up to SAFETY times the largest difference of an R. A wrong collective makes it a hundred times larger:

    step   lm_loss A   lm_loss B     |A - B|   rounding explains
       1   4.1271238   4.1271243    4.8e-07             8.9e-06      agrees
       1   4.1271238   4.1302110    3.1e-03             8.9e-06      differs

It compares the initial weights (bit for bit), the gradients of step 1 before clipping, the update of step 1, loss and
gradient norm of every step, and the movement of the weights over all steps. A small difference of an R may be luck. So
parameters of the same kind in all layers share one bound, a bound never shrinks from step to step, and the bound of the
first gradient norm comes from the gradient itself: norms of two vectors differ by at most the norm of their difference.

Which parameter is to blame? A wrong gradient contaminates all gradients that backward reaches later, so the first one:

    backward   lm_head ▶ norm ▶ layer 3 ▶ layer 2 … down up gate norm o v k q norm ▶ layer 1 ▶ layer 0 ▶ embedding
    agrees?       yes     yes      yes                yes  yes yes  yes yes no no no no     no       no      no
                                                                       ▲ v_proj of layer 2

If the loss of step 1 differs, forward is wrong already, and with it every gradient. Then the parameter to blame is the
one that differs most in the first layer (or embedding, final norm, head) whose output differs, averaged over all
tokens. If loss and gradients agree, it is the parameter whose update differs most.

In bfloat16 rounding explains gradient errors of many percent, and smaller faults are not detected
(`Comparison.blind_below`); `kenotron compare --dtype float32` detects them.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kenotron.checkpoint import reading, saving
from kenotron.config import Config, dump
from kenotron.kernels.fused import use_kernels
from kenotron.kernels.hashing import derive_key
from kenotron.kernels.random import fill_normal_
from kenotron.models import Context, build, named_parameters
from kenotron.optim.clip import clip_gradients
from kenotron.parallel.partial_gradients import meta_attention
from kenotron.parallel.ranks import gather
from kenotron.parallel.shards import shard_of
from kenotron.training.build import build_run
from kenotron.training.deterministic import deterministic
from kenotron.training.run import Run, close
from kenotron.training.saved_state import model_tensors, optimizer_tensors
from kenotron.training.step import count_real_tokens, forward_backward, train_step

if TYPE_CHECKING:
    from kenotron.data import TokenBatch
    from kenotron.parallel.mesh import Mesh

PERTURBATION = {"float32": 2.0**-17, "float16": 2.0**-12, "bfloat16": 2.0**-9}
"""Compute dtype → relative standard deviation of the R's perturbations."""
SEEDS = (1, 2, 3)  # of the R's
SAFETY = 3.0  # for norms over a parameter, which are hardly ever small by luck
NUMBER_SAFETY = 10.0  # for a single loss or gradient norm, which may be small by luck
FLOOR = 16 * torch.finfo(torch.float32).eps  # relative: losses and sums are fp32 in every run
# Adam takes a step of full size in the direction of a gradient's sign, which rounding decides if it is near 0. So the
# updates of a parameter are compared only if rounding changes its gradient by at most NOISY of its norm, and then
# without the elements that differ most: a share of TRIMMED, and at least four.
NOISY = 0.01
TRIMMED = 0.25


# ---- one run -----------------------------------------------------------------------------------------------


def record(config: Config, mesh: Mesh, device: torch.device, *, steps: int, seed: int, folder: str) -> None:
    """Train `steps` steps of `config` on this layout and write tensors and losses to `folder`. All ranks call it.

    With `seed` 0 the config is unchanged; other seeds perturb the initial weights, as for the R's.
    """
    from kenotron.training import console

    console.start_logging(config, mesh)
    console.logger.setLevel("WARNING")
    with deterministic(config.general.deterministic), use_kernels(config.model.kernels), ExitStack() as at_end:
        run = build_run(config, mesh, device)
        at_end.callback(close, run)
        root, numbers = Path(folder), []
        if seed:
            _perturb(run, PERTURBATION[config.model.dtype], seed)
        _save(run, root / "start", model_tensors(*run.parts), {})
        while run.step < steps:
            batches = list(run.data.batch(run.step + 1, mesh.rank("batch"), mesh.degree("batch")))
            if run.step == 0:
                _save_gradients(run, batches, root / "gradients")
            result = train_step(run, batches)
            run.step += 1
            numbers.append([result.lm_loss, result.grad_norm])
            if run.step == 1:
                _save(run, root / "updated", model_tensors(*run.parts), {})
        _save(run, root / "end", model_tensors(*run.parts), {"numbers": numbers})


@torch.no_grad()
def _perturb(run: Run, size: float, seed: int) -> None:
    for name, parameter in named_parameters(*run.parts):
        shard = shard_of(parameter)
        noise = torch.empty(shard.tensor.shape, dtype=shard.tensor.dtype, device=shard.tensor.device)
        fill_normal_(replace(shard, tensor=noise), derive_key("compare", seed, name), size)
        shard.tensor.addcmul_(shard.tensor, noise)
    if run.pipeline is not None:
        run.pipeline.share_tied_weights()


def _save_gradients(run: Run, batches: Sequence[TokenBatch], root: Path) -> None:
    """Save gradients before clipping, and outputs, of a second pass over `batches`, to see leftovers of the first."""
    parameters = dict(named_parameters(*run.parts))
    outputs = _Outputs(run)
    for _ in range(2):
        run.optimizer.zero_grad(set_to_none=True)
        forward_backward(run, batches, 1.0 / max(count_real_tokens(run, batches), 1))
        clip_gradients(parameters.values(), None, run.mesh)  # sums partial gradients
    gradients = {f"state.{name}.gradient": p.grad for name, p in parameters.items() if p.grad is not None}
    _save(run, root, optimizer_tensors(gradients, run.parts) | outputs.means(), {})
    run.optimizer.zero_grad(set_to_none=True)


class _Outputs:
    """Sums the outputs of layers, embedding and final norm over tokens, on the ranks that have them."""

    def __init__(self, run: Run) -> None:
        self.sums: dict[str, tuple[Tensor, int]] = {}
        self.hooks = []
        names = [name for name, _ in named_parameters(run.skeleton)]
        for layer in [] if run.config.model.compile else dict.fromkeys(map(layer_of, names)):
            for part in run.parts:
                module = dict(part.named_modules()).get(layer)
                if module is not None:
                    self.hooks.append(module.register_forward_hook(partial(self._add, layer)))

    def _add(self, layer: str, module: Any, inputs: Any, output: Any) -> None:
        if torch.is_tensor(output):
            rows = output.detach().float().flatten(0, -2)
            total, count = self.sums.get(layer, (0.0, 0))
            self.sums[layer] = total + rows.sum(0).cpu(), count + len(rows)

    def means(self) -> dict[str, Tensor]:
        """Stop summing, and return ``output.<layer>`` → the mean over the tokens of all ranks."""
        for hook in self.hooks:
            hook.remove()
        ranks = gather(self.sums)
        means = {}
        for layer in dict.fromkeys(layer for sums in ranks for layer in sums):
            totals, counts = zip(*(sums[layer] for sums in ranks if layer in sums))
            means[f"output.{layer}"] = torch.stack(totals).sum(0) / sum(counts)
        return means


def layer_of(name: str) -> str:
    """Return the layer of a parameter, ``model.layers.3``, or outside of layers its module, ``model.norm``."""
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer.group() if layer else name.rpartition(".")[0]


def _save(run: Run, root: Path, tensors: dict[str, Any], state: dict[str, Any]) -> None:
    saving.save(root, 1, model=tensors, optimizer=None, state=state, config_yaml=dump(run.config), model_config={})


# ---- how far a run is from A -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distances:
    """Distances of a run from A: by parameter, the norm of the difference over A's norm, in the order of backward."""

    numbers: list[list[float]]  # [lm_loss, grad_norm] of each step of the run itself
    start: dict[str, float]
    gradients: dict[str, float]
    gradient: float  # of the gradients of all parameters as one vector
    outputs: dict[str, float]  # of step 1, by layer, in the order of forward
    update: dict[str, float]  # of step 1
    movement: dict[str, float]  # from the first weights to the last


def distances(a: Path, other: Path, names: Sequence[str]) -> Distances:
    """Return the distances of another run from A for the parameters in `names`, from the folders `record` wrote."""
    start, updated, end = (_pairs(a / kind, other / kind) for kind in ("start", "updated", "end"))
    gradient_of = _pairs(a / "gradients", other / "gradients")
    kinds = ("start", "gradients", "outputs", "update", "movement")
    relative: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    squares = torch.zeros(2, dtype=torch.float64)
    for name in names:
        of_a, of_other = start(name)
        relative["start"][name] = _relative((of_other - of_a).norm(), of_a.norm())
        for later, kind in ((updated, "update"), (end, "movement")):
            moved_a, moved_other = (after - before for after, before in zip(later(name), (of_a, of_other)))
            relative[kind][name] = _relative(_trimmed_norm(moved_other - moved_a), moved_a.norm())
        of_a, of_other = gradient_of(f"state.{name}.gradient")
        difference, norm = (of_other - of_a).norm(), of_a.norm()
        relative["gradients"][name] = _relative(difference, norm)
        squares += torch.stack((difference, norm)).square()
    shapes, _ = reading.block_reader(a / "gradients" / "1")
    for layer in dict.fromkeys(layer_of(name) for name in reversed(names)):
        if f"output.{layer}" in shapes:
            of_a, of_other = gradient_of(f"output.{layer}")
            relative["outputs"][layer] = _relative((of_other - of_a).norm(), of_a.norm())
    numbers = json.loads((other / "end" / "1" / "manifest.json").read_text())["state"]["numbers"]
    return Distances(numbers, gradient=_relative(*squares.sqrt()), **relative)


def backward_order(config: Config) -> list[str]:
    """Return all parameters of the model in the order of backward, traced on the meta device without computation."""
    with torch.device("meta"):
        model = build(config.model)
        names = [name for name, _ in named_parameters(model)]
        reached: list[str] = []
        for name, parameter in named_parameters(model):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: reached.append(name))
        tokens = torch.zeros(8, dtype=torch.int64)
        ctx = Context(shape=(1, 8), positions=torch.arange(8), attention=meta_attention, sample_ids=tokens[:1])
        try:
            logits = model(tokens, ctx)
            logits.sum().backward()
        except RuntimeError:  # the model reads values, which meta tensors lack
            reached = []
    return [*reached, *(name for name in reversed(names) if name not in reached)]


def _pairs(a: Path, other: Path) -> Callable[[str], tuple[Tensor, Tensor]]:
    readers = [reading.block_reader(folder / "1") for folder in (a, other)]

    def read(name: str) -> tuple[Tensor, Tensor]:
        of_a, of_other = (block(name, (0,) * len(shapes[name]), shapes[name]).double() for shapes, block in readers)
        return of_a, of_other

    return read


def _relative(difference: Tensor, norm: Tensor) -> float:
    return float(difference / norm.clamp(min=torch.finfo(torch.float64).tiny))


def _trimmed_norm(difference: Tensor) -> Tensor:
    squares = difference.flatten().square()
    count = squares.numel()
    kept = max(1, count - max(4, int(TRIMMED * count)))
    return squares[squares <= squares.kthvalue(kept).values].sum().sqrt()


# ---- the comparison ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Number:
    """One number of both runs, and the difference that rounding alone may cause."""

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
    """The relative difference of one parameter: the norm of the difference of B and A, over A's norm."""

    name: str
    difference: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """All results of the comparison; parameters are in the order of backward."""

    numbers: list[Number]
    start: list[ParameterDifference]  # initial weights, equal to the bit
    outputs: list[ParameterDifference]  # of the layers in step 1, in the order of forward
    gradients: list[ParameterDifference]  # of step 1, before clipping
    update: list[ParameterDifference]  # of the weights in step 1, unless rounding dominates their gradients
    movement: list[ParameterDifference]  # of the weights in all steps, likewise

    @property
    def agrees(self) -> bool:
        """Whether rounding explains every difference."""
        tensors = (*self.start, *self.gradients, *self.update, *self.movement)
        return all(number.agrees for number in self.numbers) and not _wrong(tensors)

    def first_number(self) -> Number | None:
        """Return the first loss or gradient norm that differs by more than rounding explains."""
        return next((number for number in self.numbers if not number.agrees), None)

    def origin(self) -> tuple[str, ParameterDifference] | None:
        """Return the kind of the first difference, and the parameter to blame (see the module); None if all agree."""
        if wrong := _wrong(self.start):
            return "initial weights", _farthest(wrong)
        if wrong := _wrong(self.gradients):
            return "gradient of step 1", wrong[0] if self.numbers[0].agrees else self._origin_in_forward(wrong)
        first = self.first_number()
        if first is None or first.step > 1:
            if wrong := _wrong(self.update):
                return "update of step 1", _farthest(wrong)
            if wrong := _wrong(self.movement):
                return "weights at the end", _farthest(wrong)
        return None  # at most a loss or norm differs

    def _origin_in_forward(self, gradients: list[ParameterDifference]) -> ParameterDifference:
        """Return the farthest gradient of the first layer whose output differs.

        If no output differs, return the farthest among parameters without a recorded output, such as the head.
        """
        right = {output.name for output in self.outputs if output.agrees}
        first = next((output.name for output in self.outputs if not output.agrees), None)
        suspects = [gradient for gradient in gradients if layer_of(gradient.name) not in right]
        if first is not None:
            suspects = [gradient for gradient in suspects if layer_of(gradient.name) == first]
        return _farthest(suspects or gradients)

    def blind_below(self) -> tuple[float, ParameterDifference]:
        """Return the relative gradient error that rounding may hide: the median over parameters, and the worst."""
        worst = max(self.gradients, key=lambda gradient: gradient.allowed)
        return statistics.median(gradient.allowed for gradient in self.gradients), worst


def _wrong(tensors: Sequence[ParameterDifference]) -> list[ParameterDifference]:
    return [tensor for tensor in tensors if not tensor.agrees]


def _farthest(tensors: Sequence[ParameterDifference]) -> ParameterDifference:
    """Return the difference farthest beyond its bound; NaN is farthest of all."""
    return max(tensors, key=lambda one: math.inf if math.isnan(one.difference) else one.difference - one.allowed)


def judge(a: Distances, rounding: Sequence[Distances], b: Distances) -> Comparison:
    """Compare B's distances from A with those of the R's (`rounding`); `a` are A's from itself, for its numbers."""
    numbers = [run.numbers for run in rounding]
    gradients = _tensors([run.gradients for run in rounding], b.gradients)
    known = [gradient.name for gradient in gradients if gradient.allowed <= NOISY]
    return Comparison(
        _numbers(a.numbers, numbers, b.numbers, _allowed([run.gradient for run in rounding])),
        [ParameterDifference(name, difference, 0.0) for name, difference in b.start.items()],
        _tensors([run.outputs for run in rounding], b.outputs),
        gradients,
        _tensors([run.update for run in rounding], {name: b.update[name] for name in known}),
        _tensors([run.movement for run in rounding], {name: b.movement[name] for name in known}),
    )


def _allowed(distances: Sequence[float], safety: float = SAFETY) -> float:
    return safety * max(distances) + FLOOR


def _numbers(
    a: list[list[float]], others: Sequence[list[list[float]]], b: list[list[float]], gradient: float
) -> list[Number]:
    numbers = []
    allowed = [0.0, gradient]  # relative
    for step, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
        for which, name in enumerate(("lm_loss", "grad_norm")):
            value = of_a[which]
            apart = _allowed([abs(value - other[step][which]) / (abs(value) or 1.0) for other in others], NUMBER_SAFETY)
            allowed[which] = max(allowed[which], apart)
            numbers.append(Number(name, step + 1, value, of_b[which], allowed[which] * abs(value)))
    return numbers


def _tensors(others: Sequence[dict[str, float]], b: dict[str, float]) -> list[ParameterDifference]:
    if not b:
        return []
    allowed: dict[str, float] = {}
    for name in b:
        kind = _kind(name)
        allowed[kind] = max(allowed.get(kind, 0.0), _allowed([other[name] for other in others]))
    median = statistics.median(allowed[_kind(name)] for name in b)
    return [ParameterDifference(name, distance, max(allowed[_kind(name)], median)) for name, distance in b.items()]


def _kind(name: str) -> str:
    """Return the name of a parameter or layer with ``*`` for the layer's number."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
