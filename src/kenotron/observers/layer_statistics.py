"""`metrics_logging`: norms of gradients, weights and updates of every layer, and statistics of its activations.

    grad_norm/layers.3           L2 norm of the layer's gradient, before clipping
    weight_norm/layers.3         L2 norm of its weights, after the update
    update_ratio/layers.3        norm of the update / norm of the weights
    activation_rms/layers.3      root mean square of the hidden states that it returns
    attention_entropy/layers.3   in nats, mean over heads and QUERIES tokens of each sequence
    attention_logit_max/layers.3 largest score of these tokens, before softmax
    logit_max                    largest logit of LOGITS tokens of each sequence

Norms are from the step itself. The other statistics are from another forward pass over the step's batch, with the
weights after the update, so that training computes the same bits with and without them: this costs a third of a step
every `log_detail_interval` steps. With context parallelism no rank has all keys, and the two fields of attention are
left out. Models of Hugging Face and your own models have them if they call `ctx.attention`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.kernels.attentions.masked import visible
from kenotron.models import named_parameters
from kenotron.models.plan import modules
from kenotron.observers.nonfinite import eager_blocks
from kenotron.observers.validation import forward
from kenotron.optim.clip import EPSILON, clip_gradients, sharding_of
from kenotron.parallel.collectives import all_reduce
from kenotron.parallel.data import evaluating
from kenotron.parallel.shards import local_tensor
from kenotron.training.expert_loads import loads_of_step
from kenotron.training.hooks import Hook
from kenotron.training.step import count_real_tokens, forward_backward, to_device

if TYPE_CHECKING:
    from kenotron.config.logging import MetricsLogging
    from kenotron.models.context import Context
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

QUERIES, LOGITS = 64, 16  # tokens of each sequence, evenly spread


class LayerStatistics(Hook):
    """See the module; on all ranks."""

    priority = 30

    def __init__(self, settings: MetricsLogging) -> None:
        self.settings = settings
        self.before: dict[str, Tensor] = {}  # this rank's weights, while they are updated

    def on_train_start(self, run: Run) -> None:
        """Name the layers: the blocks, and each parameter outside of them."""
        self.blocks = [name for name, _ in modules(run.skeleton, run.skeleton.plan.blocks)]
        self.layers = list(dict.fromkeys(self._layer_of(name) for name, _ in named_parameters(run.skeleton)))

    def before_update(self, run: Run) -> None:
        """Store the norms of the gradients, and a copy of the weights."""
        if (run.step + 1) % self.settings.log_detail_interval == 0:
            self.gradients = self._norms(run, lambda name, parameter: parameter.grad)
            self.before = {name: local_tensor(weight).clone() for name, weight in named_parameters(*run.parts)}

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record the fields."""
        if not self.before:
            return
        updates = self._norms(run, lambda name, parameter: local_tensor(parameter) - self.before[name])
        self.before = {}
        weights = self._norms(run, lambda name, parameter: parameter)
        max_norm = run.config.optimizer.clip_grad
        clipped = 1.0 if max_norm is None else max(1.0, (result.grad_norm + EPSILON) / max_norm)
        for layer, gradient, weight, update in zip(self.layers, self.gradients, weights, updates):
            _record(run, f"grad_norm/{layer}", gradient * clipped)
            _record(run, f"weight_norm/{layer}", weight)
            _record(run, f"update_ratio/{layer}", update / weight if weight else 0.0)
        self._record_activations(run)

    def _layer_of(self, name: str) -> str:
        block = next((block for block in self.blocks if name.startswith(f"{block}.")), None)
        return (block or name.removesuffix(".weight")).removeprefix("model.")

    @torch.no_grad()
    def _norms(self, run: Run, values: Callable[[str, Any], Tensor | None]) -> list[float]:
        """Return the norm of each layer's `values` of its parameters, over all shards; None counts as zero."""
        squares: dict[Any, dict[int, Tensor]] = defaultdict(dict)
        for name, parameter in named_parameters(*run.parts):
            if (value := values(name, parameter)) is not None:
                square = torch.linalg.vector_norm(local_tensor(value), dtype=torch.float64).square()
                layer, layers = self.layers.index(self._layer_of(name)), squares[sharding_of(parameter)]
                layers[layer] = layers.get(layer, 0.0) + square
        total = torch.zeros(len(self.layers), dtype=torch.float64, device=run.device)
        for (mesh, sharded), layers in squares.items():
            sums = torch.stack(list(layers.values()))
            for dim in sharded:
                dist.all_reduce(sums, group=mesh.get_group(dim))
            total[list(layers)] += sums
        all_reduce(total, run.mesh.group("pp"))
        return total.sqrt().tolist()  # type: ignore[no-any-return]

    @torch.no_grad()
    def _record_activations(self, run: Run) -> None:
        statistics = _ActivationStatistics(self.blocks, run)
        with evaluating(run.parts, run.roots), eager_blocks(run), statistics.recording():
            for batch in run.batches:
                micro_batch = to_device(batch, run)
                sequences, length = micro_batch.ctx.shape
                starts = torch.arange(sequences, device=run.device)[:, None] * length
                kept = (starts + _spread(length, LOGITS, run.device)).flatten()
                attention = partial(statistics.attention, micro_batch.ctx.attention)
                ctx = replace(micro_batch.ctx, attention=attention, logits_to_keep=kept)
                micro_batch = replace(micro_batch, labels=None, ctx=ctx)
                logits = forward(run, micro_batch)
                if isinstance(logits, Tensor):
                    statistics.largest[-1].clamp_(min=logits.max())
        all_reduce(statistics.sums, run.mesh.group("world"))
        all_reduce(statistics.largest, run.mesh.group("world"), dist.ReduceOp.MAX)
        *largest, logit_max = statistics.largest.tolist()
        for block, (squares, count, entropy, queries), most in zip(self.blocks, statistics.sums.tolist(), largest):
            layer = block.removeprefix("model.")
            if count:
                _record(run, f"activation_rms/{layer}", math.sqrt(squares / count))
            if queries:
                _record(run, f"attention_entropy/{layer}", entropy / queries)
                _record(run, f"attention_logit_max/{layer}", most)
        _record(run, "logit_max", logit_max)


class _ActivationStatistics:
    """Sums and maxima of each block, over this rank's tokens and heads."""

    def __init__(self, blocks: list[str], run: Run) -> None:
        self.local = [(blocks.index(n), block) for part in run.parts for n, block in modules(part, part.plan.blocks)]
        self.block_of = {id(module): number for number, block in self.local for module in block.modules()}
        self.sums = torch.zeros(len(blocks), 4, dtype=torch.float64, device=run.device)
        self.largest = torch.full((len(blocks) + 1,), -math.inf, dtype=torch.float64, device=run.device)
        self.has_all_keys = run.mesh.degree("cp") == 1

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record statistics of the outputs of blocks."""
        with ExitStack() as hooks:
            for number, block in self.local:
                hooks.enter_context(block.register_forward_hook(partial(self._add_output, number)))
            yield

    def _add_output(self, number: int, block: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.sums[number, 0] += torch.linalg.vector_norm(hidden, dtype=torch.float64).square()
        self.sums[number, 1] += hidden.numel()

    def attention(
        self, function: Any, q: Tensor, k: Tensor, v: Tensor, ctx: Context, layer: Any = None, *more: Any, **named: Any
    ) -> Tensor:
        """Record statistics of the scores, and return the result of `function`."""
        if self.has_all_keys and id(layer) in self.block_of:
            self._add_scores(self.block_of[id(layer)], q, k, ctx, *more, **named)
        return function(q, k, v, ctx, layer, *more, **named)  # type: ignore[no-any-return]

    def _add_scores(
        self, number: int, q: Tensor, k: Tensor, ctx: Context, scale: float | None = None, window: int | None = None
    ) -> None:
        rows = _spread(q.shape[2], QUERIES, q.device)
        grouped = q[:, :, rows].float().unflatten(1, (k.shape[1], -1))
        scores = grouped @ k.float().unsqueeze(2).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(~visible(q, ctx, window, rows).unsqueeze(2), -math.inf)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1)
        self.sums[number, 2] += entropy.sum()
        self.sums[number, 3] += entropy.numel()
        self.largest[number].clamp_(min=scores.max())


class GradientNoise(Hook):
    """`metrics_logging.gradient_noise_scale`: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.

    It is computed from the squared gradient norms of the step's first micro-batches and of its whole batch, b and B
    sequences: the trace of the covariance is S = (g_b - g_B) / (1/b - 1/B), the true gradient's squared norm is
    G = (B g_B - b g_b) / (B - b). Both are averaged over measurements with weights that decay by `DECAY`; their ratio
    is the noise scale, in sequences.
    """

    priority = 30
    DECAY = 0.9

    def __init__(self, settings: MetricsLogging) -> None:
        self.settings = settings
        self.small: float | None = None
        self.averages: list[float] = []

    def before_step(self, run: Run) -> None:
        """Measure the gradient of the first micro-batch of every rank."""
        if (run.step + 1) % self.settings.log_detail_interval:
            return
        if len(run.batches) == 1:  # at the start of a batch_size_ramp
            return
        first = run.batches[:1]
        forward_backward(run, first, 1 / max(count_real_tokens(run, first), 1), run.loss_scale)
        loads_of_step(run)  # reset the counts, as the step itself counts again
        parameters = [parameter for _, parameter in named_parameters(*run.parts)]
        self.small = (float(clip_gradients(parameters, None, run.mesh)) / run.loss_scale) ** 2
        run.optimizer.zero_grad(set_to_none=True)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Record the noise scale."""
        small, self.small = self.small, None
        if small is None or not (result.finite and math.isfinite(small)):
            return
        big, most = result.grad_norm**2, run.data.stage_at(run.step).batch_size(run.step)
        few = most / len(run.batches)
        measured = [(small - big) / (1 / few - 1 / most), (most * big - few * small) / (most - few)]
        self.averages = [
            self.DECAY * old + (1 - self.DECAY) * new for old, new in zip(self.averages or [0.0, 0.0], measured)
        ]
        _record(run, "gradient_noise_scale", self.averages[0] / self.averages[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the averages."""
        return {"averages": self.averages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages."""
        self.averages = state["averages"]


def _spread(length: int, count: int, device: torch.device) -> Tensor:
    """Return at most `count` positions of a sequence, evenly spread, including the last."""
    return torch.linspace(0, length - 1, min(count, length), device=device).round().long()


def _record(run: Run, name: str, value: float) -> None:
    run.record_metric(name, value, on_console=False)
