"""Where NaN or infinity comes from: the step is computed once more, with a look at the output of every module.

    step 12: lm_loss nan, grad_norm nan: first in forward, in the output of model.layers.5.mlp.down_proj on rank 3;
    computed again, it is the same

Data and randomness are functions of the step, and a step that is not finite changes no weight, so the same step can be
computed again; a normal one costs nothing. If it is finite then, a transient fault of a machine is the cause. Else
the first module is named: in forward by its output; in backward by gradients of its output that are finite and of its
input that are not, which takes a third run. Only the first step in a row is looked at.

`nonfinite_steps.jsonl` in the run's folder has the samples with their documents: those of the micro-batch, in forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from kenotron.data.provenance import described_samples
from kenotron.models import named_parameters
from kenotron.observers.module_buffers import buffers_kept
from kenotron.optim.clip import clip_gradients
from kenotron.parallel.ranks import gather
from kenotron.parallel.shards import shard_of
from kenotron.training.console import logger
from kenotron.training.expert_loads import loads_of_step
from kenotron.training.hooks import Hook
from kenotron.training.metrics import drop_later_steps
from kenotron.training.run_folder import append_line, log_folder
from kenotron.training.step import Numbers, StepResult, count_real_tokens, forward_backward

if TYPE_CHECKING:
    from pathlib import Path

    from kenotron.training.run import Run

FILE = "nonfinite_steps.jsonl"
WEIGHT, FORWARD, BACKWARD, GRADIENT = range(4)  # in the order in which they are looked for
PLACES = ("in the weight {}", "in forward, in the output of {}", "in backward, in {}", "in the gradient of {}")


@dataclass(frozen=True)
class FirstNonFinite:
    """The first place of one rank: `order` counts modules or parameters of the whole model in the order of the pass."""

    where: int
    order: int
    name: str
    samples: tuple[int, ...]  # of the micro-batch, or of all of the rank's


class NonFiniteCause(Hook):
    """See the module; on all ranks."""

    priority = 65  # before anything touches the weights
    known = False

    def on_train_start(self, run: Run) -> None:
        """Drop the lines of steps that are done again after a resume."""
        if run.mesh.is_first:
            drop_later_steps(_path(run), run.step)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Look for the cause after the first non-finite step in a row."""
        if result.broken and not self.known:
            self._report(run, result)
        self.known = result.broken

    def _report(self, run: Run, result: StepResult) -> None:
        again, finding = _computed_again(run, partial(_forward_hooks, run))
        finding = _weights(run) or finding or _gradients(run)
        run.optimizer.zero_grad(set_to_none=True)
        findings = gather(finding)
        first = min((each.where for each in findings if each is not None), default=None)
        if first == GRADIENT:
            finding = _computed_again(run, partial(_backward_hooks, run))[1] or finding
            run.optimizer.zero_grad(set_to_none=True)
            findings = gather(finding)
        if run.mesh.is_first:
            _write(run, result, again, findings)


# ---- the step again ------------------------------------------------------------------------------------------


def _computed_again(run: Run, hooks: Any) -> tuple[StepResult, FirstNonFinite | None]:
    """Loss and gradient norm of the last step, computed once more, and what `hooks` found; `.grad` is kept."""
    assert run.last_result is not None
    with eager_blocks(run), buffers_kept(run), hooks() as found:
        real_tokens = count_real_tokens(run, run.batches)
        losses = forward_backward(run, run.batches, 1.0 / max(real_tokens, 1))
    loads_of_step(run)  # counted twice otherwise
    norm = clip_gradients([parameter for _, parameter in named_parameters(*run.parts)], None, run.mesh)
    loss, z_loss, grad_norm = Numbers(*losses, norm).read()
    result = replace(run.last_result, lm_loss=loss, z_loss=z_loss, grad_norm=grad_norm)
    return result, found[0] if found else None


def eager_blocks(run: Run) -> AbstractContextManager[None]:
    """Within, compiled blocks run as they are written: compiled, they would pass over hooks of modules."""
    return torch.compiler.set_stance("force_eager") if run.config.model.compile else nullcontext()


@contextmanager
def _forward_hooks(run: Run) -> Iterator[list[FirstNonFinite]]:
    """Looks at the outputs of all modules."""
    found: list[FirstNonFinite] = []
    order, micro_batch = _module_order(run), -1

    def begins(module: nn.Module, inputs: Any) -> None:
        nonlocal micro_batch
        micro_batch += 1

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and not _finite(output):
            alone = run.pipeline is None
            batches = run.batches[micro_batch : micro_batch + 1] if alone else run.batches
            found.append(FirstNonFinite(FORWARD, order.get(name, len(order)), name, _samples(batches)))

    with ExitStack() as hooks:
        hooks.enter_context(run.model.register_forward_pre_hook(begins))
        for part in run.parts:
            for name, module in part.named_modules():
                hooks.enter_context(module.register_forward_hook(partial(look, name)))
        yield found


@contextmanager
def _backward_hooks(run: Run) -> Iterator[list[FirstNonFinite]]:
    """Looks for a module that makes finite gradients of its output non-finite ones of its input."""
    found: list[FirstNonFinite] = []
    order = _module_order(run)

    def enter(module: nn.Module, inputs: Any) -> Any:
        return tuple(_Entrance.apply(x) if _has_gradient(x) else x for x in inputs)

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        finite: list[bool] = []

        def arrived(gradient: Tensor) -> None:
            finite.append(_finite(gradient))

        def leaves(gradient: Tensor) -> None:
            if not found and finite and all(finite) and not _finite(gradient):
                found.append(FirstNonFinite(BACKWARD, -order.get(name, len(order)), name, _samples(run.batches)))

        for values, see in ((tree_leaves(output), arrived), (inputs, leaves)):
            for tensor in filter(_has_gradient, values):
                if not tensor.is_leaf:  # a parameter would keep the hook
                    tensor.register_hook(see)

    named = [(name, module) for part in run.parts for name, module in part.named_modules() if name]
    with ExitStack() as hooks:
        for name, module in named:
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(partial(look, name)))
        yield found


class _Entrance(torch.autograd.Function):
    """x, by a way of its own into one module: its gradient is what this module makes, whoever else reads x.

    Torch's hooks for the backward pass of modules wrap tensors in views, which nothing may change in place and a
    pipeline's split backward may not detach.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        return gradient[0]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _weights(run: Run) -> FirstNonFinite | None:
    """The first weight of this rank that is not finite."""
    for order, (name, parameter) in enumerate(named_parameters(*run.parts)):
        if not _finite(shard_of(parameter.detach()).tensor):
            return FirstNonFinite(WEIGHT, order, name, ())
    return None


def _gradients(run: Run) -> FirstNonFinite | None:
    """The last weight of this rank, the first in backward, whose gradient is not finite."""
    for order, (name, parameter) in reversed(list(enumerate(named_parameters(*run.parts)))):
        if parameter.grad is not None and not _finite(shard_of(parameter.grad).tensor):
            return FirstNonFinite(GRADIENT, -order, name, _samples(run.batches))
    return None


def _module_order(run: Run) -> dict[str, int]:
    return {name: number for number, (name, _) in enumerate(run.skeleton.named_modules())} | {"": 10**9}


def _samples(batches: Any) -> tuple[int, ...]:
    return tuple(sorted({int(sample) for batch in batches for sample in batch.sample_ids}))


def _finite(value: Any) -> bool:
    """Whether all floating-point numbers in a tensor, or in nested tuples of them, are finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    return not isinstance(value, tuple | list) or all(map(_finite, value))


# ---- the report ----------------------------------------------------------------------------------------------


def _write(run: Run, result: StepResult, again: StepResult, findings: list[FirstNonFinite | None]) -> None:
    """Log where it came from, and write the line of `nonfinite_steps.jsonl`."""
    known = [(each.where, each.order) for each in findings if each is not None]
    ranks = [rank for rank, each in enumerate(findings) if each is not None and (each.where, each.order) == min(known)]
    line: dict[str, Any] = {"iteration": run.step, "lm_loss": repr(result.lm_loss), "grad_norm": repr(result.grad_norm)}
    before, now = (f"lm_loss {each.lm_loss:.4g}, grad_norm {each.grad_norm:.4g}" for each in (result, again))
    samples = {sample for each in findings if each is not None for sample in each.samples}
    place = ""
    if ranks and not again.finite:
        finding = findings[ranks[0]]
        assert finding is not None
        layer = re.search(r"layers\.(\d+)", finding.name)
        line |= {
            "where": ("weight", "forward", "backward", "gradient")[finding.where],
            "module": finding.name or "loss",
        }
        line |= {"layer": int(layer[1]) if layer else None, "ranks": ranks}
        name = finding.name or "the whole model, the loss"
        place = f": first {PLACES[finding.where].format(name)} on rank {', '.join(map(str, ranks))}"
        samples = {sample for rank in ranks if (each := findings[rank]) for sample in each.samples}
    line["again"] = "finite" if again.finite else "the same" if before == now else "other numbers"
    verdict = {
        "finite": f"computed again it is finite ({now}): a transient fault, suspect the hardware",
        "the same": "computed again it is the same: not a transient fault",
        "other numbers": f"computed again it is not finite either, but different ({now})",
    }[line["again"]]
    append_line(run.config, FILE, line | {"samples": described_samples(run.data, run.step, samples)})
    logger.warning("step %d: %s%s; %s; its samples are in %s", run.step, before, place, verdict, _path(run))


def _path(run: Run) -> Path:
    return log_folder(run.config) / FILE
