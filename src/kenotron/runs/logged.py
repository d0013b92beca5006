"""A run's folder, read."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from kenotron.config.errors import InputError, no_such_path, os_errors
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
"""How the names begin of the metrics in each group; `train` has all others."""


def tag_of(name: str) -> str:
    """The curve of a metric, whose first part groups it with others: ``val_loss`` → ``val/loss``."""
    for group, beginnings in GROUPS.items():
        if name.startswith(beginnings):
            return f"{group}/{name.removeprefix(f'{group}_')}"
    return name if "/" in name else f"train/{name}"


@dataclass(frozen=True)
class LoggedRun:
    """A run's folder: `steps` has the metrics of each step in order, `config` the plain values of its config.yaml."""

    folder: Path
    name: str
    steps: dict[int, dict[str, Any]]
    config: dict[str, Any]

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """Its starts and ends, in their order."""
        return [line for _, line in logged_lines(self.folder / HISTORY)]

    @property
    def last_start(self) -> dict[str, Any]:
        """The newest start; empty where the folder has none."""
        return next((line for line in reversed(self.history) if line.get("event") == "start"), {})

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Completions of `logging.sample_prompts`."""
        return [line for _, line in logged_lines(self.folder / SAMPLES)]

    def setting(self, path: str, default: Any = None) -> Any:
        """The value of a dotted key of the config; `default` where it has none."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value


def read_run(path: Path) -> LoggedRun:
    """The run in a folder, or of a metrics.jsonl. Raises InputError if `path` is neither."""
    metrics = path / METRICS if path.is_dir() else path
    if not path.exists():
        raise no_such_path("RUN", path)
    if not metrics.exists():
        inside = ", ".join(sorted(each.parent.name for each in path.glob(f"*/{METRICS}"))[:8])
        found = f"; it has the runs {inside}" if inside else ""
        raise InputError(f"{path}: expected the folder of a run, with {METRICS}{found}")
    with os_errors(f"cannot read {metrics}"):
        steps, empty = logged_steps(metrics), not metrics.stat().st_size
    steps = {step: steps[step] for step in sorted(steps) if {"consumed_tokens", "lm_loss"} <= steps[step].keys()}
    if not steps and not empty:
        raise InputError(f"{metrics}: expected the {METRICS} of a run")
    folder = metrics.absolute().parent
    return LoggedRun(folder, path.name if path.is_dir() else folder.name, steps, plain_config(folder))


def plain_config(folder: Path) -> dict[str, Any]:
    """The values of a folder's config.yaml; empty where there is none that can be read."""
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
