"""`general.benchmark_csv_path`: a row for each run, with nanotron's columns, to compare runs in a table.

    job_id,name,nodes,seq_len,mbs,batch_accum,gbs,mTFLOPs,hTFLOPs,tok/s/gpu,Mem Alloc (GB),…,Total Params,Local Params
    N/A,tiny,1,256,2,1,2,0.0023,0.0023,9531.2,0.31,…,12368,12368

Speeds are averages from the fourth step on, or over all steps of a shorter run. nanotron's benchmark mode
(``NANOTRON_BENCHMARK=1``) ends the run after four steps: the row then has the speed of the fourth, as in nanotron.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import InputError, RunFailed
from kenotron.parallel import device as devices
from kenotron.storage.files import locked
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.report import parameter_counts

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

WARM_UP = 3  # steps that are not measured, in which memory is allocated and kernels are compiled and chosen
SPEEDS = {
    "mTFLOPs": "model_tflops_per_gpu",
    "hTFLOPs": "hardware_tflops_per_gpu",
    "tok/s/gpu": "tokens_per_sec_per_gpu",
}


class Benchmark(Hook):
    """Appends the row at the end of the run; only on rank 0."""

    priority = -80

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps_here = 0
        self.stops = os.environ.get("NANOTRON_BENCHMARK") == "1"
        self._reset()

    def _reset(self) -> None:
        self.seconds = 0.0
        self.amounts = dict.fromkeys(SPEEDS, 0.0)  # TFLOP and tokens in these seconds

    def on_train_start(self, run: Run) -> None:
        """Raise InputError before training if a row of these columns cannot be appended to the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                header = next(csv.reader(file), [])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not a CSV file: {error}"
            raise InputError(f"general.benchmark_csv_path: cannot write to {self.path}: {reason}") from error
        columns = list(columns_of(run, dict.fromkeys(SPEEDS, 0.0)))
        if header and header != columns:
            unknown = next((name for name in header if name not in columns), None)
            what = f"the column '{unknown}', which rows do not have" if unknown else f"{len(header)} columns"
            raise InputError(
                f"general.benchmark_csv_path: expected a new file, or one with the {len(columns)} columns of a "
                f"benchmark row; {self.path} has {what}"
            )

    def after_step(self, run: Run, result: StepResult) -> None:
        """Add the step to the speed; in benchmark mode stop after the fourth."""
        self.steps_here += 1
        if self.steps_here == WARM_UP + 1:
            self._reset()
            if self.stops:
                run.stop("NANOTRON_BENCHMARK=1")
        seconds = run.last_metrics["elapsed_time_per_iteration_ms"] / 1000
        self.seconds += seconds
        for column, metric in SPEEDS.items():
            self.amounts[column] += run.last_metrics[metric] * seconds

    def on_train_end(self, run: Run) -> None:
        """Append the row, after a header if it is the first. Raises RunFailed if the file cannot be written."""
        if not self.steps_here:
            return
        row = columns_of(run, {column: amount / self.seconds for column, amount in self.amounts.items()})
        try:
            with locked(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    writer.writerow(row)
                writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in row.values())
        except OSError as error:
            raise RunFailed(f"general.benchmark_csv_path: cannot write to {self.path}: {error.strerror}") from error
        logger.info("Benchmark: %s", " | ".join(f"{column} {row[column]:.6g}" for column in SPEEDS))
        logger.info("Benchmark row appended to %s", self.path)


def columns_of(run: Run, speeds: dict[str, float]) -> dict[str, Any]:
    """Return column → value: `speeds` under the names of `SPEEDS`, memory in GiB, and values of the config."""
    config, layout, model = run.config, run.config.parallelism, run.config.model
    architecture, memory = model.decoder, devices.memory(run.device)
    parameters = parameter_counts(run.skeleton, run.parts)
    return {
        "job_id": os.environ.get("SLURM_JOB_ID", "N/A"),
        "name": config.general.run,
        "nodes": layout.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size)),
        "seq_len": config.tokens.sequence_length,
        "mbs": config.tokens.micro_batch_size,
        "batch_accum": config.tokens.batch_accumulation_per_replica,
        "gbs": config.global_batch_size,
        **speeds,
        "Mem Alloc (GB)": memory["peak_allocated"] / 2**30,
        "Mem Res (GB)": memory["peak_reserved"] / 2**30,
        "dp": layout.dp,
        "pp": layout.pp,
        "tp": layout.tp,
        "cp": layout.context_parallel_size,
        "ep": layout.expert_parallel_size,
        "pp_engine": layout.pp_engine,
        "tp_mode": layout.tp_mode,
        "tp_async_comm": layout.tp_linear_async_communication,
        "recompute_layer": layout.recompute_layer,
        "hidden_size": architecture.hidden_size,
        "hidden_act": architecture.hidden_act,
        "num_layers": architecture.num_hidden_layers,
        "num_heads": getattr(architecture, "num_attention_heads", None),
        "num_kv_heads": getattr(architecture, "kv_heads", None),
        "max_pos": getattr(architecture, "max_position_embeddings", None),
        "vocab_size": architecture.vocab_size,
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "dtype": model.dtype,
        "zero_stage": config.zero_stage,
        "ddp_bucket_cap_mb": model.ddp_bucket_cap_mb,
        "accumulate_grad_in_fp32": config.optimizer.accumulate_grad_in_fp32,
        "Total Params": parameters["Total"],
        "Local Params": parameters["Local"],
    }
