"""Find the origin of NaN or infinity: compute the step again, and check the output of every module.

    step 12: lm_loss nan, grad_norm nan: first in forward, in the output of model.layers.5.mlp.down_proj on rank 3;
    computed again, it is the same

Data and randomness are functions of the step, and a non-finite step changes no weight, so the same step can be computed
again; finite steps cost nothing. If the repeated step is finite, a transient fault of a machine is the cause. Otherwise
the first module is reported: in forward by its output; in backward by finite gradients of its output and non-finite
gradients of its input, which takes a third computation. Only the first of several non-finite steps in a row is checked.

`nonfinite_steps.jsonl` in the run's folder has the samples and their documents, in forward only the micro-batch's.
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
WEIGHT, FORWARD, BACKWARD, GRADIENT = range(4)  # in the order of the search
PLACES = ("in the weight {}", "in forward, in the output of {}", "in backward, in {}", "in the gradient of {}")


@dataclass(frozen=True)
class FirstNonFinite:
    """The first non-finite tensor of one rank; `order` is the position of `name` in the order of the pass."""

    where: int
    order: int
    name: str
    samples: tuple[int, ...]  # of the micro-batch if it is known, or of all of the rank's micro-batches


class NonFiniteCause(Hook):
    """See the module; on all ranks."""

    priority = 65  # before any hook that changes the weights
    reported = False  # whether the last step was broken, and its cause reported

    def on_train_start(self, run: Run) -> None:
        """Drop the lines of steps that are repeated after a resume."""
        if run.mesh.is_first:
            drop_later_steps(_path(run), run.step)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Search for the cause after the first non-finite step in a row."""
        if result.broken and not self.reported:
            self._report(run, result)
        self.reported = result.broken

    def _report(self, run: Run, result: StepResult) -> None:
        again, finding = _compute_again(run, partial(_forward_hooks, run))
        finding = _weights(run) or finding or _gradients(run)
        run.optimizer.zero_grad(set_to_none=True)
        findings = gather(finding)
        first = min((finding.where for finding in findings if finding is not None), default=None)
        if first == GRADIENT:
            finding = _compute_again(run, partial(_backward_hooks, run))[1] or finding
            run.optimizer.zero_grad(set_to_none=True)
            findings = gather(finding)
        if run.mesh.is_first:
            _write(run, result, again, findings)


# ---- repeating the step --------------------------------------------------------------------------------------


def _compute_again(run: Run, hooks: Any) -> tuple[StepResult, FirstNonFinite | None]:
    """Compute loss and gradient norm of the last step again; return them and the finding of `hooks`; keep `.grad`."""
    assert run.last_result is not None
    with eager_blocks(run), buffers_kept(run), hooks() as findings:
        real_tokens = count_real_tokens(run, run.batches)
        losses = forward_backward(run, run.batches, 1.0 / max(real_tokens, 1))
    loads_of_step(run)  # reset the counts, as the step has counted already
    norm = clip_gradients([parameter for _, parameter in named_parameters(*run.parts)], None, run.mesh)
    loss, z_loss, grad_norm = Numbers(*losses, norm).read()
    result = replace(run.last_result, lm_loss=loss, z_loss=z_loss, grad_norm=grad_norm)
    return result, findings[0] if findings else None


def eager_blocks(run: Run) -> AbstractContextManager[None]:
    """Run compiled blocks eagerly in the block of code, because compiled ones ignore hooks of modules."""
    return torch.compiler.set_stance("force_eager") if run.config.model.compile else nullcontext()


@contextmanager
def _forward_hooks(run: Run) -> Iterator[list[FirstNonFinite]]:
    """Check the outputs of all modules; the list gets the first non-finite one."""
    findings: list[FirstNonFinite] = []
    order, micro_batch = _module_order(run), -1

    def begins(module: nn.Module, inputs: Any) -> None:
        nonlocal micro_batch
        micro_batch += 1

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not findings and not _finite(output):
            batches = run.batches if run.pipeline is not None else run.batches[micro_batch : micro_batch + 1]
            findings.append(FirstNonFinite(FORWARD, order.get(name, len(order)), name, _samples(batches)))

    with ExitStack() as hooks:
        hooks.enter_context(run.model.register_forward_pre_hook(begins))
        for part in run.parts:
            for name, module in part.named_modules():
                hooks.enter_context(module.register_forward_hook(partial(look, name)))
        yield findings


@contextmanager
def _backward_hooks(run: Run) -> Iterator[list[FirstNonFinite]]:
    """Search for a module with finite gradients of its output and non-finite gradients of its input."""
    findings: list[FirstNonFinite] = []
    order = _module_order(run)

    def enter(module: nn.Module, inputs: Any) -> Any:
        return tuple(_Entrance.apply(x) if _has_gradient(x) else x for x in inputs)

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        finite: list[bool] = []

        def arrived(gradient: Tensor) -> None:
            finite.append(_finite(gradient))

        def leaves(gradient: Tensor) -> None:
            if not findings and finite and all(finite) and not _finite(gradient):
                findings.append(FirstNonFinite(BACKWARD, -order.get(name, len(order)), name, _samples(run.batches)))

        for values, see in ((tree_leaves(output), arrived), (inputs, leaves)):
            for tensor in filter(_has_gradient, values):
                if not tensor.is_leaf:  # hooks on parameters would stay
                    tensor.register_hook(see)

    named = [(name, module) for part in run.parts for name, module in part.named_modules() if name]
    with ExitStack() as hooks:
        for name, module in named:
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(partial(look, name)))
        yield findings


class _Entrance(torch.autograd.Function):
    """Returns x as a separate input of one module, so that its gradient is that of this module alone.

    Torch's hooks for the backward pass of modules wrap tensors in views, which must not be changed in place, and which
    a pipeline's split backward must not detach.
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
    """Return the first non-finite weight of this rank."""
    for order, (name, parameter) in enumerate(named_parameters(*run.parts)):
        if not _finite(shard_of(parameter.detach()).tensor):
            return FirstNonFinite(WEIGHT, order, name, ())
    return None


def _gradients(run: Run) -> FirstNonFinite | None:
    """Return the last weight of this rank, the first in backward, with a non-finite gradient."""
    for order, (name, parameter) in reversed(list(enumerate(named_parameters(*run.parts)))):
        if parameter.grad is not None and not _finite(shard_of(parameter.grad).tensor):
            return FirstNonFinite(GRADIENT, -order, name, _samples(run.batches))
    return None


def _module_order(run: Run) -> dict[str, int]:
    return {name: number for number, (name, _) in enumerate(run.skeleton.named_modules())} | {"": 10**9}


def _samples(batches: Any) -> tuple[int, ...]:
    return tuple(sorted({int(sample) for batch in batches for sample in batch.sample_ids}))


def _finite(value: Any) -> bool:
    """Return whether all floating-point numbers in a tensor, or in nested tuples of them, are finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    return not isinstance(value, tuple | list) or all(map(_finite, value))


# ---- the report ----------------------------------------------------------------------------------------------


def _write(run: Run, result: StepResult, again: StepResult, findings: list[FirstNonFinite | None]) -> None:
    """Log the origin, and write the line of `nonfinite_steps.jsonl`."""
    by_rank = {rank: finding for rank, finding in enumerate(findings) if finding is not None}
    first = min(((finding.where, finding.order) for finding in by_rank.values()), default=None)
    ranks = [rank for rank, finding in by_rank.items() if (finding.where, finding.order) == first]
    line: dict[str, Any] = {"iteration": run.step, "lm_loss": repr(result.lm_loss), "grad_norm": repr(result.grad_norm)}
    before, now = (f"lm_loss {step.lm_loss:.4g}, grad_norm {step.grad_norm:.4g}" for step in (result, again))
    samples = {sample for finding in by_rank.values() for sample in finding.samples}
    place = ""
    if ranks and not again.finite:
        finding = by_rank[ranks[0]]
        layer = re.search(r"layers\.(\d+)", finding.name)
        line |= {
            "where": ("weight", "forward", "backward", "gradient")[finding.where],
            "module": finding.name or "loss",
            "layer": int(layer[1]) if layer else None,
            "ranks": ranks,
        }
        name = finding.name or "the whole model, the loss"
        place = f": first {PLACES[finding.where].format(name)} on rank {', '.join(map(str, ranks))}"
        samples = {sample for rank in ranks for sample in by_rank[rank].samples}
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
