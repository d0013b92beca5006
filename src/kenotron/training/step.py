"""One training step: forward, backward, clip, update.

A step computes a list of micro-batches. Each token's loss is weighted with 1 / (real tokens of the global batch), so
losses and gradients of micro-batches and ranks simply add up, however unevenly the tokens are spread:

    micro-batch 1: 510 real tokens ─ loss sum / 1000 ─┐
    micro-batch 2: 490 real tokens ─ loss sum / 1000 ─┴─▶ the mean over 1000 tokens

The host waits for the device once, for loss and gradient norm together (`Numbers.read`), which decide whether the
weights are updated. torch's fused Adam decides this on the GPU, and so is queued before the host waits; other
optimizers are queued after the wait. Numbers that are on the hosts already (token counts, requests to stop) are summed
between the hosts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kenotron.kernels.attentions.documents import bound_of_documents
from kenotron.models import Context, MicroBatch, named_parameters
from kenotron.models.decoder import Decoder
from kenotron.models.token_loss import TrainingLoss, load_loss
from kenotron.optim.clip import clip_gradients, decides_alone, scale_gradients, step_where_finite
from kenotron.optim.groups import set_learning_rates
from kenotron.parallel import data as data_parallel
from kenotron.parallel.collectives import all_reduce, sum_over_ranks
from kenotron.parallel.device import mark, upload
from kenotron.training.expert_loads import ExpertLoads, follow_loads, loads_of_step
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.data import TokenBatch
    from kenotron.training.run import Run


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step, global over the layout. `lm_loss` is in nats per token, without the z-loss."""

    lm_loss: float
    z_loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool  # the weights are unchanged
    real_tokens: int
    seconds: float
    data_wait_seconds: float = 0.0
    loss_scale: float = 1.0
    expert_loads: ExpertLoads | None = None

    @property
    def finite(self) -> bool:
        """Whether losses and gradient norm are finite."""
        return all(map(math.isfinite, (self.lm_loss, self.z_loss, self.grad_norm)))

    @property
    def overflow(self) -> bool:
        """Whether they are not finite, and a smaller loss scale may help."""
        return not self.finite and self.loss_scale > 1

    @property
    def broken(self) -> bool:
        """Whether they are not finite, and the loss scale is not the reason."""
        return not self.finite and not self.overflow


def train_step(run: Run, batches: Sequence[TokenBatch]) -> StepResult:
    """Do step ``run.step + 1`` on this rank's micro-batches. A non-finite loss or gradient leaves weights unchanged."""
    started = time.perf_counter()
    real_tokens = count_real_tokens(run, batches)

    losses = forward_backward(run, batches, 1.0 / max(real_tokens, 1), run.loss_scale)
    loads = loads_of_step(run)
    loads_on_host = loads.on_host() if loads is not None else None
    parameters = [parameter for _, parameter in named_parameters(*run.parts)]
    if run.loss_scale != 1:
        scale_gradients(parameters, 1 / run.loss_scale)
    schedule, step = run.config.optimizer.learning_rate_scheduler, run.step + 1 - run.start.schedule_start
    rate = set_learning_rates(run.optimizer, schedule, step, run.config.tokens.train_steps)
    max_norm, on_device = run.config.optimizer.clip_grad, decides_alone(run.optimizer) and not _hooks_decide(run)
    norm = clip_gradients(parameters, None if on_device else max_norm, run.mesh)
    numbers = Numbers(*losses, norm)
    if on_device:
        _update(run, partial(step_where_finite, run.optimizer, numbers.on_device, norm, max_norm))
    lm_loss, z_loss, grad_norm = numbers.read()
    accepted = all(map(math.isfinite, (lm_loss, z_loss, grad_norm)))
    accepted = accepted and all(hook.accepts_update(run, lm_loss, grad_norm) for hook in run.hooks)
    if accepted and not on_device:
        _update(run, run.optimizer.step)
    if accepted and run.pipeline is not None:
        run.pipeline.share_tied_weights()
    if accepted and loads is not None:
        follow_loads(run, loads)
    run.optimizer.zero_grad(set_to_none=True)
    return StepResult(
        lm_loss=lm_loss,
        z_loss=z_loss,
        grad_norm=grad_norm,
        learning_rate=rate,
        skipped=not accepted,
        real_tokens=real_tokens,
        seconds=time.perf_counter() - started,
        loss_scale=run.loss_scale,
        expert_loads=loads_on_host,
    )


def forward_backward(
    run: Run, batches: Sequence[TokenBatch], token_weight: float, loss_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `loss_scale` times the gradients of the global mean loss; return (loss, its z part), summed over ranks.

    `token_weight` is the weight of a token in the mean: 1 / (real tokens of the global batch).
    """
    loss = load_loss(run.config.model.loss)
    if getattr(run.config.model.loss, "negatives", None) == "batch":
        loss = replace(loss, counts=_counts_of_labels(run, batches))  # type: ignore[type-var]  # a dataclass
    sequences = sum(len(batch.tokens) for batch in batches) * run.mesh.degree("batch")
    scales = loss_scale * token_weight, loss_scale / sequences
    micro_batches: Iterable[MicroBatch] = (to_device(batch, run, *scales, loss) for batch in batches)
    if run.teach is not None:
        micro_batches = map(run.teach, micro_batches)
    if run.pipeline is not None:
        total = run.pipeline.step(list(micro_batches))
    else:
        total = _accumulate(run.model, micro_batches, len(batches), run.device)
    for root in run.roots:
        data_parallel.finish_gradients(root)
    if run.pipeline is not None:
        run.pipeline.sum_tied_gradients()
    all_reduce(total, run.mesh.group("loss"))
    if loss_scale != 1:
        total /= loss_scale
    return total[0], total[1]


def _counts_of_labels(run: Run, batches: Sequence[TokenBatch]) -> torch.Tensor:
    """Count how often each token is a label in the global batch: ``[vocab]``."""
    labels = np.concatenate([batch.labels.ravel() for batch in batches])
    counts = np.bincount(labels[labels >= 0], minlength=run.config.model.decoder.vocab_size)
    return all_reduce(upload(counts, run.device, torch.float32), run.mesh.group("batch"))


class Numbers:
    """(loss without its z part, z part, gradient norm), which are being copied from the device to the host."""

    def __init__(self, loss: torch.Tensor, z_loss: torch.Tensor, norm: torch.Tensor) -> None:
        self.on_device = torch.stack((loss - z_loss, z_loss, norm.to(loss.device)))
        self.on_host = self.on_device.to("cpu", non_blocking=True)
        self.copied = mark(self.on_device.device)

    def read(self) -> list[float]:
        """Return the Python numbers; this is the only time in a step that the host waits for the device."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host.tolist()


def _update(run: Run, step: Callable[[], Any]) -> None:
    """Call the optimizer's `step`, after pending copies of the tensors that it changes."""
    run.checkpoints.fence()
    for hook in run.hooks:
        hook.before_update(run)
    step()


def _hooks_decide(run: Run) -> bool:
    """Return whether a hook overrides `accepts_update` or `before_update`, which need the host before an update."""
    defaults = (Hook.accepts_update, Hook.before_update)
    return any((kind.accepts_update, kind.before_update) != defaults for kind in {type(hook) for hook in run.hooks})


def _accumulate(model: Decoder, micro_batches: Iterable[MicroBatch], count: int, device: torch.device) -> torch.Tensor:
    """Run forward and backward of every micro-batch; return ``[2]``: the sums of their losses and z parts."""
    total = torch.zeros(2, device=device)
    for number, micro_batch in enumerate(micro_batches, start=1):
        data_parallel.set_last_micro_batch(model, last=number == count)
        loss, z_loss = model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)
        loss.backward()
        total += torch.stack((loss.detach(), z_loss))
    return total


def count_real_tokens(run: Run, batches: Sequence[TokenBatch]) -> int:
    """Count the labels with a loss in the whole global batch."""
    local = sum(int((batch.labels != -100).sum()) for batch in batches)
    return sum_over_ranks(local, run.mesh.group("batch"), run.device)


def to_device(
    batch: TokenBatch, run: Run, loss_scale: float = 1.0, sequence_scale: float = 0.0, loss: TrainingLoss | None = None
) -> MicroBatch:
    """Return a numpy batch as flat tensors on the run's device, with the `Context` that blocks read.

    With context parallelism it has this rank's tokens of every sequence.
    """
    sequences, length = batch.tokens.shape
    device = run.device
    if batch.positions is None:
        positions = torch.arange(length, device=device).repeat(sequences)
    else:
        positions = upload(batch.positions, device).flatten()
    borders = None if batch.documents is None else document_borders(batch.documents)
    ctx = Context(
        shape=(sequences, length),
        positions=positions,
        attention=run.attention,
        cu_seqlens=borders,
        document_starts=None if borders is None else upload(borders, device, torch.int32),
        longest=None if borders is None else bound_of_documents(borders, length),
        sample_ids=upload(batch.sample_ids, device).flatten(),
        loss_scale=loss_scale,
        sequence_weights=None if batch.weights is None else upload(batch.weights, device, torch.float32),
        sequence_scale=sequence_scale,
        loss=loss,
    )
    micro_batch = MicroBatch(upload(batch.tokens, device).flatten(), upload(batch.labels, device).flatten(), ctx)
    if run.mesh.degree("cp") == 1:
        return micro_batch
    from kenotron.parallel import context

    return context.shard(micro_batch, run.mesh, run.config.parallelism.context_parallel_method)


def document_borders(documents: NDArray[np.integer]) -> tuple[int, ...]:
    """Return flat indices of starts of documents and sequences, and the end: [[0, 0, 1], [1, 1, 1]] → (0, 2, 3, 6)."""
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return (*np.flatnonzero(begins).tolist(), documents.size)
