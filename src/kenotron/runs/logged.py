"""Read a run's folder: metrics, history, samples and config."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from kenotron.config.errors import InputError, no_such_path, os_errors, shortest_end
from kenotron.runs.files import HISTORY, METRICS, SAMPLES, logged_lines, logged_steps

GROUPS = {
    "layers": ("grad_norm/", "weight_norm/", "update_ratio/", "activation_rms/", "attention_", "logit_max"),
    "val": ("val_",),
    "test": ("test_",),
    "optimizer": ("grad_norm", "lr", "gradient_", "skipped", "loss_scale"),
    "experts": ("expert_",),
    "data": ("consumed_tokens", "epochs/", "global_batch_size", "real_tokens", "sequence_length"),
    "speed": ("tokens_per_sec", "elapsed_time", "model_tflops", "hardware_tflops", "data_wait", "mfu", "matmul_share"),
    "memory": ("cuda_", "cpu_", "hd_"),
}
"""Group → prefixes of the names of its metrics; all other metrics are in `train`."""


def tag_of(name: str) -> str:
    """Return the name of a metric's curve, whose first part is its group: ``val_loss`` → ``val/loss``."""
    for group, prefixes in GROUPS.items():
        if name.startswith(prefixes):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return name if "/" in name else f"train/{name}"


@dataclass(frozen=True)
class LoggedRun:
    """The content of a run's folder: `steps` has the metrics of each step in order, `config` the parsed config.yaml."""

    folder: Path
    name: str
    steps: dict[int, dict[str, Any]]
    config: dict[str, Any]

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The starts and ends of the run, in order."""
        return [line for _, line in logged_lines(self.folder / HISTORY)]

    @property
    def last_start(self) -> dict[str, Any]:
        """The newest start; empty if the folder has none."""
        return next((line for line in reversed(self.history) if line.get("event") == "start"), {})

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Completions of `logging.sample_prompts`."""
        return [line for _, line in logged_lines(self.folder / SAMPLES)]

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the value of a dotted key of the config; `default` if it is missing."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value


def read_run(path: Path) -> LoggedRun:
    """Read the run in a folder, or of a metrics.jsonl. Raises InputError if `path` is neither."""
    metrics = path / METRICS if path.is_dir() else path
    if not path.exists():
        raise no_such_path("RUN", path)
    if not metrics.exists():
        inside = ", ".join(sorted(str(file.parent.relative_to(path)) for file in path.rglob(METRICS))[:8])
        hint = f"; it has the runs {inside}" if inside else ""
        raise InputError(f"{path}: expected the folder of a run, with {METRICS}{hint}")
    with os_errors(f"cannot read {metrics}"):
        steps, empty = logged_steps(metrics), not metrics.stat().st_size
    steps = {step: steps[step] for step in sorted(steps) if {"consumed_tokens", "lm_loss"} <= steps[step].keys()}
    if not steps and not empty:
        raise InputError(f"{metrics}: expected the {METRICS} of a run")
    folder = metrics.absolute().parent
    return LoggedRun(folder, folder.name, steps, plain_config(folder))


def read_runs(paths: Iterable[Path]) -> list[LoggedRun]:
    """Read several runs; each is named by the shortest end of its path that no other has, such as ``r``, or ``a/r``."""
    runs = {str(run.folder): run for run in map(read_run, paths)}
    return [replace(run, name=shortest_end(folder, runs.keys() - {folder})) for folder, run in runs.items()]


def plain_config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.yaml of a folder; empty if it is missing or invalid."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}
