"""Metrics of every step, written to the console and to ``metrics.jsonl``.

`metrics.jsonl` has one JSON object per step with raw numbers under the console's names:

    {"iteration": 5, "consumed_tokens": 2560, …, "lm_loss": 5.27, "lr": 0.000264, …}

TFLOPs are computed as in nanotron: three times the forward products, the whole attention square (no causal discount);
`hardware` adds the blocks' forward that recomputation repeats. `mfu` is the model's share of the vendor's bf16 peak,
`matmul_share` of the fastest matrix product measured on this machine in the run's dtype; both also with only the
causal half (`_causal`). docs/metrics.md has every field.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kenotron.config.errors import RunFailed
from kenotron.config.model import Headless
from kenotron.models import flops_per_token
from kenotron.models.plan import modules
from kenotron.models.recomputation import Recompute, flops_again
from kenotron.parallel import device as devices
from kenotron.runs.files import logged_lines
from kenotron.storage.files import remove_leftovers, replace_file
from kenotron.training.hooks import Hook
from kenotron.training.report import run_log
from kenotron.training.run_folder import writing

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.models import Decoder
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

matmul_ceiling = cache(devices.matmul_ceiling)  # measured once per process
MEMORY_STEPS = 4  # the number of first steps that show memory and disk, as does the step after a save


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of a token, forward and backward, in sequences of one length.

    A causal mask needs only `causal_share` of them; with recomputation the hardware executes `hardware_factor` times
    as many.
    """

    flops: float
    causal_share: float
    hardware_factor: float

    @classmethod
    def of(cls, model: Decoder, length: int, recompute: Recompute, scored: int | None = None) -> FlopsPerToken:
        """Return the FLOPs of `model` per token in sequences of `length` tokens; `recompute` sets the blocks' repeats.

        `scored`: the number of tokens with logits (`scored_tokens`); None: the vocabulary.
        """
        unscored = 0 if scored is None else model.config.vocab_size - scored
        saved = 2.0 * unscored * model.config.hidden_size
        forward = flops_per_token(model, length, causal=False) - saved
        blocks = modules(model, model.plan.blocks)  # embedding and head are computed only once
        again = sum(flops_again(block, model.config, recompute, length, causal=False) for _, block in blocks)
        causal = flops_per_token(model, length, causal=True) - saved
        return cls(3 * forward, causal / forward, 1 + again / (3 * forward))


def scored_tokens(config: Config, length: int) -> int | None:
    """Return the number of tokens that get logits with a headless loss and `length`; None for the whole vocabulary."""
    loss = config.model.loss
    return loss.tokens_of_a_set(config.tokens.micro_batch_size, length) if isinstance(loss, Headless) else None


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation: `loss` in nats per token, `bytes` of UTF-8 text in the `tokens` (0 if unknown).

    `sources` has the result of each source, if there are several; `ema` is the result of the averaged weights
    (`optimizer.ema_decay`).
    """

    loss: float
    tokens: int
    bytes: float
    seconds: float
    sources: dict[str, ValidationResult] = field(default_factory=dict)
    ema: ValidationResult | None = None

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of loss per byte of UTF-8 text; None if the number of bytes is unknown."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None

    def metrics(self, split: str = "val") -> dict[str, float]:
        """Return the fields of ``metrics.jsonl``, with the prefix `split`."""
        fields = {"loss": self.loss, "tokens": float(self.tokens), "seconds": self.seconds}
        if self.bits_per_byte is not None:
            fields["bits_per_byte"] = self.bits_per_byte
        for label, source in self.sources.items():
            fields[f"loss/{label}"] = source.loss
            if source.bits_per_byte is not None:
                fields[f"bits_per_byte/{label}"] = source.bits_per_byte
        if self.ema is not None:
            fields["loss_ema"] = self.ema.loss
        return {f"{split}_{name}": value for name, value in fields.items()}


@dataclass(frozen=True)
class EvaluationResult:
    """Results of evaluation tasks on the checkpoint of `step`; `metrics` are fields of ``metrics.jsonl``."""

    step: int
    metrics: dict[str, float]


class Metrics(Hook):
    """Writes every step's line of metrics; only on rank 0."""

    priority = -10

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file: TextIO | None = None
        self.steps_here = 0
        self.written_step = 0
        self.just_saved = False
        self.validation: dict[str, float] = {}

    def on_train_start(self, run: Run) -> None:
        """Open `metrics.jsonl`, without steps that are repeated after a resume. Raises InputError if it cannot."""
        path = self.folder / "metrics.jsonl"
        drop_later_steps(path, run.step)
        with writing(path):
            self.file = path.open("a", buffering=1)
        recompute = run.config.parallelism.recompute_layer
        self.work: dict[int, FlopsPerToken] = {}
        for length in {stage.sequence_length for stage in run.data.stages}:
            self.work[length] = FlopsPerToken.of(run.skeleton, length, recompute, scored_tokens(run.config, length))
        self.world = run.config.parallelism.world_size

    def after_validation(self, run: Run, result: ValidationResult) -> None:
        """Keep the numbers for this step's line."""
        self.validation = result.metrics()

    def after_evaluation(self, run: Run, result: EvaluationResult) -> None:
        """Write a separate line, with the step of the evaluated checkpoint."""
        self._write(run, {"iteration": result.step, **result.metrics})

    def on_save(self, run: Run, path: Path) -> None:
        """Show memory and disk in the next line."""
        self.just_saved = True

    def after_step(self, run: Run, result: StepResult) -> None:
        """Write the step's line to the file and, at its interval, to the console."""
        self.steps_here += 1
        self.written_step = run.step
        shown = self._console_fields(run, result)
        raw = {**shown, **self._other_fields(run, result), **self._source_fields(run), **self.validation}
        recorded = self._take_recorded(run, raw)
        raw |= recorded
        self.validation = {}
        run.last_metrics = raw
        self._write(run, raw)
        interval = run.config.logging.iteration_step_info_interval
        if (run.step - 1) % interval == 0 or run.finished:
            on_console = {name: value for name, value in recorded.items() if name not in run.off_console}
            run_log(run.config).step(run, shown, on_console)

    def _write(self, run: Run, line: dict[str, Any]) -> None:
        assert self.file is not None
        # JSON lacks NaN and infinity: null on a skipped step.
        numbers = {name: value if math.isfinite(value) else None for name, value in line.items()}
        try:
            self.file.write(json.dumps(numbers) + "\n")
        except OSError as error:
            path, self.file = self.file.name, None  # closing it would write again
            raise not_written(path, run, error) from error

    def _take_recorded(self, run: Run, raw: dict[str, Any]) -> dict[str, Any]:
        """Return and reset the metrics that hooks recorded for this step."""
        recorded, run.recorded = run.recorded, {}
        if duplicates := sorted(recorded.keys() & raw.keys()):
            raise RunFailed(
                f"step {run.step}: a hook recorded the metric {duplicates[0]!r}, which every step has already; "
                f"record it under another name"
            )
        return recorded

    def on_error(self, run: Run, error: Exception) -> None:
        """Write the line of the last step, if another hook failed before it was written."""
        if run.last_result is not None and self.written_step < run.step:
            self.after_step(run, run.last_result)

    def on_close(self, run: Run) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()

    def _console_fields(self, run: Run, result: StepResult) -> dict[str, Any]:
        """Return the fields of the console line, under nanotron's names and in its order."""
        seconds = result.seconds + result.data_wait_seconds
        tokens_per_sec = run.step_tokens / seconds
        stage = run.data.stage_at(run.step)
        work = self.work[stage.sequence_length]
        tflops = work.flops * tokens_per_sec / self.world / 1e12
        fields: dict[str, Any] = {
            "iteration": run.step,
            "consumed_tokens": run.consumed_tokens,
            "elapsed_time_per_iteration_ms": seconds * 1000,
            "tokens_per_sec": tokens_per_sec,
            "tokens_per_sec_per_gpu": tokens_per_sec / self.world,
            "global_batch_size": stage.batch_size(run.step),
        }
        if len(self.work) > 1:
            fields["sequence_length"] = stage.sequence_length
        fields["lm_loss"] = result.lm_loss
        if run.model.config.z_loss_enabled:
            fields["z_loss"] = result.z_loss
        fields |= {
            "lr": result.learning_rate,
            "model_tflops_per_gpu": tflops,
            "hardware_tflops_per_gpu": tflops * work.hardware_factor,
            "grad_norm": result.grad_norm,
        }
        if self.steps_here <= MEMORY_STEPS or self.just_saved:
            fields |= memory_fields(run)
            self.just_saved = False
        return fields

    def _other_fields(self, run: Run, result: StepResult) -> dict[str, Any]:
        """Return the fields that the console line does not show."""
        work = self.work[run.data.stage_at(run.step).sequence_length]
        achieved = work.flops * run.step_tokens / self.world / (result.seconds + result.data_wait_seconds)
        fields: dict[str, Any] = {
            "data_wait_ms": result.data_wait_seconds * 1000,
            "real_tokens": result.real_tokens,
            "skipped": result.skipped,
        }
        fields["matmul_share"] = achieved / matmul_ceiling(run.device, run.config.model.dtype)
        fields["matmul_share_causal"] = fields["matmul_share"] * work.causal_share
        peak = devices.vendor_peak(run.device)
        if peak is not None:
            fields["mfu"] = achieved / peak
            fields["mfu_causal"] = fields["mfu"] * work.causal_share
        return fields

    def _source_fields(self, run: Run) -> dict[str, Any]:
        """Return the tokens and epochs read from each source, if the run has several."""
        if len({source.label for stage in run.data.stages for source in stage.sources}) == 1:
            return {}
        fields: dict[str, Any] = {}
        for label, (tokens, epochs) in run.data.consumption(run.step).items():
            fields[f"consumed_tokens/{label}"] = tokens
            if epochs is not None:
                fields[f"epochs/{label}"] = epochs
        return fields


def not_written(path: str, run: Run, error: OSError) -> RunFailed:
    """Return the error that ends a run whose metrics cannot be written to `path`."""
    return RunFailed(
        f"{path}: cannot write the metrics of step {run.step}: {error.strerror}; free space there, or set another "
        f"logging.log_dir, and start the same command again: it resumes from the newest checkpoint"
    )


def memory_fields(run: Run) -> dict[str, int]:
    """Return the memory of the device (of the process, on a CPU) and of the disk of checkpoints, in bytes."""
    memory = devices.memory(run.device)
    prefix = "cuda" if run.device.type == "cuda" else "cpu"
    fields = {
        f"{prefix}_memory_allocated": memory["allocated"],
        f"{prefix}_max_memory_reserved": memory["peak_reserved"],
    }
    path = run.config.checkpoint_folder.absolute()
    while not path.exists():
        path = path.parent
    disk = shutil.disk_usage(path)
    return fields | {"hd_total_memory_tb": disk.total, "hd_used_memory_tb": disk.used, "hd_free_memory_tb": disk.free}


def drop_later_steps(path: Path, step: int) -> None:
    """Delete the lines of steps after `step`, which are repeated: a killed run may have logged more than it saved.

    Raises InputError if the file cannot be replaced.
    """
    if not path.exists():
        return
    with writing(path):
        remove_leftovers(path)  # of a run that was killed while it replaced the file
        kept = [text for text, line in logged_lines(path) if line["iteration"] <= step]
        replace_file(path, "".join(text + "\n" for text in kept).encode())
