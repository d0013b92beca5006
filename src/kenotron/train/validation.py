"""Validation: the loss on held-out documents, in nats a token and in bits a byte.

Bits per byte does not depend on the tokenizer, so it compares with any other compressor of the same text:

    bits per byte = (sum of losses over all validation tokens) / ln 2 / (bytes that those tokens stand for)

A model at 1.5 bits per byte predicts text well enough to store it in 1.5 / 8 = 19% of its size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kenotron.models import MicroBatch
from kenotron.parallel import data as data_parallel
from kenotron.parallel.collectives import all_reduce
from kenotron.train.console import human_format, logger
from kenotron.train.hooks import Hook
from kenotron.train.step import LOSS_AXES, to_device

if TYPE_CHECKING:
    from kenotron.train.run import Run
    from kenotron.train.step import StepResult


@dataclass(frozen=True)
class ValidationResult:
    """`loss` in nats a token; `bytes` of UTF-8 text that the `tokens` stand for (0 when unknown).

    `sources` has the same of each source, where there are several.
    """

    loss: float
    tokens: int
    bytes: float
    seconds: float
    sources: dict[str, ValidationResult] = field(default_factory=dict)

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def metrics(self) -> dict[str, float]:
        """Fields of ``metrics.jsonl``."""
        fields = {"val_loss": self.loss, "val_tokens": float(self.tokens), "val_seconds": self.seconds}
        if self.bits_per_byte is not None:
            fields["val_bits_per_byte"] = self.bits_per_byte
        for label, one in self.sources.items():
            fields[f"val_loss/{label}"] = one.loss
            if one.bits_per_byte is not None:
                fields[f"val_bits_per_byte/{label}"] = one.bits_per_byte
        return fields


class Validation(Hook):
    """A pass every `val_check_interval` steps and after the last one, the same samples each time."""

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.step % run.config.tokens.val_check_interval == 0 or run.finished:
            found = validate(run)
            if found is None:
                return
            logger.info("%s", validation_line(run, found))
            run.call("after_validation", found)


class Compressors(Hook):
    """Beside the last validation, what gzip and xz make of the same text. After the last save: it takes a while."""

    def __init__(self) -> None:
        self.last: ValidationResult | None = None

    def after_validation(self, run: Run, result: ValidationResult) -> None:
        self.last = result

    def on_train_end(self, run: Run) -> None:
        if not run.finished or self.last is None or self.last.bits_per_byte is None:
            return
        baselines = run.data.compression_baselines()
        if baselines:
            beside = " | ".join(f"{name}: {bits:.3f}" for name, bits in baselines.items())
            logger.info(
                "bits per byte on the validation text: %.3f | compressors on the same text: %s",
                self.last.bits_per_byte,
                beside,
            )


@torch.no_grad()
def validate(run: Run) -> ValidationResult | None:
    """One pass over the held-out samples, forward only; None when the run is asked to stop meanwhile.

    After SIGTERM there may be half a minute: it belongs to the checkpoint.
    """
    started = time.perf_counter()
    labels = run.data.held_out().labels
    sums = torch.zeros(len(labels), dtype=torch.float64)
    counts = torch.zeros(len(labels), 2, dtype=torch.float64)  # tokens, bytes
    with evaluating(run):
        for batch, byte_count, source in run.data.validation(run.mesh.dp_rank, run.mesh.dp_degree):
            run.agree()
            if run.interrupted:
                return None
            found = evaluate(run, to_device(batch, run))
            if found is not None:
                sums[source] += float(found[0] - found[1])
            counts[source] += torch.tensor([int((batch.labels != -100).sum()), byte_count])
    sums, counts = sums.to(run.device), counts.to(run.device)
    for axis in LOSS_AXES:
        all_reduce(sums, run.mesh.group(axis))
    for axis in ("dp_replicate", "dp_shard"):
        all_reduce(counts, run.mesh.group(axis))
    seconds = time.perf_counter() - started
    each = [_result(loss, of, seconds) for loss, of in zip(sums.tolist(), counts.tolist())]
    total = _result(float(sums.sum()), counts.sum(0).tolist(), seconds)
    sources = {label: one for label, one in zip(labels, each) if one.tokens} if len(labels) > 1 else {}
    return replace(total, sources=sources)


def _result(loss_sum: float, counts: list[float], seconds: float) -> ValidationResult:
    tokens, byte_sum = counts
    return ValidationResult(loss_sum / tokens if tokens else 0.0, int(tokens), byte_sum, seconds)


@contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """The parts in eval mode; afterwards again as training wants them."""
    for part in run.parts:
        part.eval()
    try:
        yield
    finally:
        for part in run.parts:
            part.train()
        for root in run.roots:
            data_parallel.show_masters(root)


def evaluate(run: Run, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(loss, its z part), forward only; None on pipeline ranks without the last part."""
    if run.pipeline is not None:
        return run.pipeline.forward(micro_batch)
    return run.model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)


def validation_line(run: Run, result: ValidationResult) -> str:
    fields = [
        f"validation: {run.step} / {run.last_step}",
        f"val_loss: {result.loss:.4g}",
        f"val_perplexity: {human_format(math.exp(min(result.loss, 700)))}",
    ]
    if result.bits_per_byte is not None:
        fields.append(f"val_bits_per_byte: {result.bits_per_byte:.4f}")
    return " | ".join([*fields, f"val_seconds: {human_format(result.seconds)}"])
