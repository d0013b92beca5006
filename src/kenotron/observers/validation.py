"""Validation and test: the loss on held-out documents, in nats per token and in bits per byte.

Bits per byte does not depend on the tokenizer, so it compares with any other compressor of the same text:

    bits per byte = (sum of losses over all validation tokens) / ln 2 / (UTF-8 bytes of those tokens)

A model at 1.5 bits per byte predicts text well enough to store it in 1.5 / 8 = 19% of its size.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kenotron.config.errors import human_format
from kenotron.data.stage_plan import SPLITS, Split
from kenotron.models import MicroBatch
from kenotron.parallel.collectives import all_reduce
from kenotron.parallel.data import evaluating
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.metrics import ValidationResult
from kenotron.training.step import to_device

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class Validation(Hook):
    """Validates every `val_check_interval` and after the last step, on the same samples; then runs one test."""

    priority = 40

    def after_step(self, run: Run, result: StepResult) -> None:
        """Validate if it is due, and pass the result to every hook's `after_validation`; test after the last step."""
        tokens = run.config.tokens
        if tokens.validates and (is_due(run) or run.finished) and (validation := validate_and_log(run, "val")):
            for hook in run.hooks:
                hook.after_validation(run, validation)
        if tokens.limit_test_batches and run.finished and (test := validate_and_log(run, "test")):
            for name, number in test.metrics("test").items():
                run.record_metric(name, number, on_console=False)


def is_due(run: Run) -> bool:
    """Return whether the last step reached another multiple of `val_check_interval`."""
    interval, unit = run.config.tokens.val_check_interval, run.config.tokens.val_check_unit
    if unit == "epochs":
        before, after = run.data.passes(run.step, interval)
    elif unit == "tokens":
        before, after = (run.data.tokens_before(step) // interval for step in (run.step, run.step + 1))
    else:
        before, after = (run.step - 1) // interval, run.step // interval
    return after > before


def validate_and_log(run: Run, split: Split) -> ValidationResult | None:
    """Validate or test, also with averaged weights, and log the result; None if the run is asked to stop meanwhile."""
    result = validate(run, split)
    if result is not None and run.config.optimizer.ema_decay is not None:
        run.checkpoints.fence()  # it may be copying the weights
        with run.optimizer.averaged():  # type: ignore[attr-defined]  # of `CombinedOptimizer`
            averaged = validate(run, split)
        result = averaged and replace(result, ema=averaged)
    if result is None:
        logger.warning("the %s after step %d is left out, as the run stops", SPLITS[split], run.step)
    else:
        logger.info("%s", result_line(run, result, split))
    return result


@torch.no_grad()
def validate(run: Run, split: Split = "val") -> ValidationResult | None:
    """Compute the loss on the held-out samples, forward only; None if the run is asked to stop meanwhile.

    The half minute after SIGTERM has to be left for the checkpoint.
    """
    started = time.perf_counter()
    labels = run.data.held_out(split).labels
    losses = torch.zeros(len(labels), dtype=torch.float64, device=run.device)
    counts = torch.zeros(len(labels), 2, dtype=torch.float64)  # tokens, bytes
    counts_samples = run.mesh.represents("batch", within="loss")  # pp and cp ranks read the same samples
    with evaluating(run.parts, run.roots):
        for batch, byte_count, source in run.data.validation(run.mesh.rank("batch"), run.mesh.degree("batch"), split):
            run.sync_stop_request()
            if run.stop_reason is not None:  # also after the last step, when no step is left to do
                return None
            loss = evaluate(run, to_device(batch, run))
            if loss is not None:
                losses[source] += loss[0] - loss[1]
            if counts_samples:
                counts[source] += torch.tensor([int((batch.labels != -100).sum()), byte_count])
    sums = torch.cat((losses[:, None], counts.to(run.device)), dim=1)
    rows = all_reduce(sums, run.mesh.group("loss")).tolist()
    seconds = time.perf_counter() - started
    total = _result(seconds, *map(sum, zip(*rows)))
    if len(labels) == 1:
        return total
    results = {label: _result(seconds, *row) for label, row in zip(labels, rows)}
    return replace(total, sources={label: result for label, result in results.items() if result.tokens})


def _result(seconds: float, loss_sum: float, tokens: float, byte_sum: float) -> ValidationResult:
    return ValidationResult(loss_sum / tokens if tokens else 0.0, int(tokens), byte_sum, seconds)


def evaluate(run: Run, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (loss, its z part), forward only; None on pipeline ranks without the last part."""
    loss = forward(run, micro_batch)
    assert not isinstance(loss, torch.Tensor), "with labels the last part returns losses"
    return loss


def forward(run: Run, micro_batch: MicroBatch) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
    """Return the model's (loss, its z part), or logits without labels; None on pipeline ranks without the last part."""
    if run.pipeline is not None:
        return run.pipeline.forward(micro_batch)
    return run.model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)


def result_line(run: Run, result: ValidationResult, split: Split) -> str:
    """Return the log line of one pass; the perplexity's exponent is capped to keep it finite."""
    fields = [
        f"{SPLITS[split]}: {run.step} / {run.last_step}",
        f"{split}_loss: {result.loss:.4g}",
        f"{split}_perplexity: {human_format(math.exp(min(result.loss, 700)))}",
    ]
    if result.bits_per_byte is not None:
        fields.append(f"{split}_bits_per_byte: {result.bits_per_byte:.4f}")
    if result.ema is not None:
        fields.append(f"{split}_loss_ema: {result.ema.loss:.4g}")
    return " | ".join([*fields, f"{split}_seconds: {human_format(result.seconds)}"])
