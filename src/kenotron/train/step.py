"""One training step: forward, backward, clip, update.

A step is a list of micro-batches. Each token's loss counts 1 / (real tokens of the global batch), so losses
and gradients of micro-batches and ranks simply add up, however unevenly the tokens are spread:

    micro-batch 1: 510 real tokens ─ loss sum / 1000 ─┐
    micro-batch 2: 490 real tokens ─ loss sum / 1000 ─┴─▶ the mean over 1000 tokens
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kenotron.kernels.attention import attention
from kenotron.models import Context, MicroBatch
from kenotron.optim.clip import all_finite, clip_gradients
from kenotron.optim.groups import set_learning_rate
from kenotron.optim.schedule import learning_rate
from kenotron.parallel import data as data_parallel
from kenotron.parallel.collectives import all_reduce
from kenotron.parallel.device import synchronize

if TYPE_CHECKING:
    from kenotron.data import TokenBatch
    from kenotron.train.run import Run


@dataclass(frozen=True)
class StepResult:
    """Numbers of one step, global over the layout. Loss in nats a token, without the z-loss."""

    lm_loss: float
    z_loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    real_tokens: int
    seconds: float
    data_wait_seconds: float = 0.0


def train_step(run: Run, batches: Sequence[TokenBatch]) -> StepResult:
    """Do step ``run.step + 1`` on this rank's micro-batches. A non-finite loss or gradient changes no weight."""
    started = time.perf_counter()
    schedule = run.config.optimizer.learning_rate_scheduler
    rate = learning_rate(schedule, run.step + 1, run.config.tokens.train_steps)
    real_tokens = count_real_tokens(run, batches)

    loss, z_loss = forward_backward(run, batches, 1.0 / max(real_tokens, 1))
    norm = clip_gradients(run.model.parameters(), run.config.optimizer.clip_grad, run.mesh)
    finite = all_finite(loss, norm)
    if finite:
        set_learning_rate(run.optimizer, rate)
        run.call("before_update")
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    synchronize(run.device)

    return StepResult(
        lm_loss=float(loss - z_loss),
        z_loss=float(z_loss),
        grad_norm=float(norm),
        learning_rate=rate,
        skipped=not finite,
        real_tokens=real_tokens,
        seconds=time.perf_counter() - started,
    )


def forward_backward(run: Run, batches: Sequence[TokenBatch], loss_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the global mean loss into ``.grad``; returns (loss, its z part), summed over ranks."""
    total = torch.zeros(2, device=run.device)
    for index, batch in enumerate(batches):
        data_parallel.set_last_micro_batch(run.model, last=index == len(batches) - 1)
        micro_batch = to_device(batch, run.device, loss_scale)
        loss, z_loss = run.model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)
        loss.backward()
        total += torch.stack((loss.detach(), z_loss))
    for axis in ("dp_replicate", "dp_shard", "cp"):
        all_reduce(total, run.mesh.group(axis))
    return total[0], total[1]


def count_real_tokens(run: Run, batches: Sequence[TokenBatch]) -> int:
    """Labels that carry a loss, in the whole global batch."""
    local = sum(int((batch.labels != -100).sum()) for batch in batches)
    if run.mesh.dp_degree == 1:
        return local
    count = torch.tensor(local, device=run.device)
    for axis in ("dp_replicate", "dp_shard"):
        all_reduce(count, run.mesh.group(axis))
    return int(count)


def to_device(batch: TokenBatch, device: torch.device, loss_scale: float = 1.0) -> MicroBatch:
    """The torch side of a numpy batch: token-flat, on `device`, with everything that blocks may read."""
    sequences, length = batch.tokens.shape

    def flat(array: object) -> torch.Tensor:
        return torch.as_tensor(array, dtype=torch.int64).reshape(-1).to(device, non_blocking=True)

    if batch.positions is None:
        positions = torch.arange(length, device=device).repeat(sequences)
    else:
        positions = flat(batch.positions)
    ctx = Context(
        shape=(sequences, length),
        positions=positions,
        attention=attention,
        cu_seqlens=None if batch.documents is None else document_borders(batch.documents),
        sample_ids=flat(batch.sample_ids),
        loss_scale=loss_scale,
    )
    return MicroBatch(flat(batch.tokens), flat(batch.labels), ctx)


def document_borders(documents) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """Flat indices where a document or a sequence begins, and the end: ``[[0, 0, 1], [1, 1, 1]]`` → (0, 2, 3, 6)."""
    starts = documents[:, 1:] != documents[:, :-1]
    length = documents.shape[1]
    inner = [int(row) * length + int(column) + 1 for row, column in zip(*starts.nonzero())]
    rows = [row * length for row in range(documents.shape[0] + 1)]
    return tuple(sorted({*inner, *rows}))


def with_wait(result: StepResult, data_wait_seconds: float) -> StepResult:
    """The same result, with the time that the step waited for its data."""
    return replace(result, data_wait_seconds=data_wait_seconds)
