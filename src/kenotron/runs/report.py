"""`kenotron report`: make an HTML page of runs, which needs no network and no server.

The page (page.html) draws the curves; this module inserts the numbers, for long runs the mean, minimum and maximum of
groups of consecutive steps.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from kenotron.config.errors import counted
from kenotron.config.writing import differences, flatten
from kenotron.runs.logged import LoggedRun, plain_config, tag_of
from kenotron.runs.summary import is_number, numbers, summary_of

POINTS = 500  # the most points of a curve
NOT_DRAWN = {
    *("iteration", "consumed_tokens", "tokens_per_sec_per_gpu", "hardware_tflops_per_gpu", "skipped", "state_hash"),
    *("matmul_share_causal", "mfu_causal", "val_tokens", "val_seconds", "hd_total_memory_tb", "hd_free_memory_tb"),
}  # metrics that another curve shows as well, or that make no curve
PAGE = Path(__file__).with_name("page.html")


def report_page(runs: Sequence[LoggedRun]) -> str:
    """Return the page of `runs` as HTML."""
    data = json.dumps([_run(run, runs[0]) for run in runs], allow_nan=False, separators=(",", ":"))
    title = ", ".join(run.name for run in runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    title = re.sub("[<>&]", lambda match: f"&#{ord(match[0])};", title)
    page = PAGE.read_text(encoding="utf-8").replace("<title></title>", f"<title>{title}</title>")
    return page.replace("/*RUNS*/[]", data.replace("<", "\\u003c"))  # "</script>" in a text would end the script


def _run(run: LoggedRun, first: LoggedRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "summary": asdict(summary_of(run)),
        "facts": list(_facts(run)),
        "history": run.history,
        "samples": run.samples,
        "config": yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True) if run.config else "",
        "changes": _changes(run, first),
        **_curves(run),
    }


def _facts(run: LoggedRun) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of the main facts: model, batch, layout and machine."""
    start = run.last_start
    family = run.setting("model.model_config.family", run.setting("model.model_config.model_type"))
    if parameters := start.get("parameters"):
        yield "Model", f"{family or 'model'}, {parameters:,} parameters"
    size, count = run.setting("tokens.micro_batch_size"), run.setting("tokens.batch_accumulation_per_replica", 1)
    keys = {"dp": "dp", "tp": "tp", "pp": "pp", "cp": "context_parallel_size", "ep": "expert_parallel_size"}
    axes = {name: run.setting(f"parallelism.{key}", 1) for name, key in keys.items()}
    if run.config:
        yield "Sequences a step", f"{size} × {count} micro-batches × {axes['dp']} replicas"
        yield "Sequence length", str(run.setting("tokens.sequence_length"))
        degrees = [f"{name} {degree}" for name, degree in axes.items() if degree not in (1, None)]
        layout = ", ".join(degrees) or "one process"
        yield "Layout", f"{layout}; ZeRO {run.setting('optimizer.zero_stage', 0)}"
        yield "Precision", str(run.setting("model.dtype"))
    if start:
        yield "Device", f"{start.get('device')}, {counted(start.get('processes', 1), 'process')}"
        versions = (f"{name} {start[name]}" for name in ("kenotron", "torch", "python") if name in start)
        yield "Versions", ", ".join(versions)
    for name, label in (("mfu", "MFU, median"), ("matmul_share", "Share of the fastest product, median")):
        if values := sorted(numbers(run.steps.values(), name)):
            yield label, f"{100 * values[len(values) // 2]:.1f}%"
            break
    if skipped := sum(line.get("skipped") is True for line in run.steps.values()):
        yield "Steps left out", str(skipped)


def _changes(run: LoggedRun, first: LoggedRun) -> dict[str, Any] | None:
    """Compare the config with the first run's; the first run's with that of the checkpoint that it started from."""
    parent = run.setting("checkpoints.resume_checkpoint_path")
    against, config = f"{first.name}, the first run", first.config
    if run is first:
        against, config = f"{parent}, its parent", plain_config(Path(parent)) if parent else {}
        if not config:
            return None
    changes = differences(dict(flatten(config)), dict(flatten(run.config)))
    return {"against": against, "keys": [(path, str(old), str(new)) for path, old, new in changes]}


def _curves(run: LoggedRun) -> dict[str, Any]:
    """Return `x`: the middles of buckets of steps, in steps, tokens and hours; `metrics`: name → its curve."""
    lines = list(run.steps.values())
    size = max(1, math.ceil(len(lines) / POINTS))
    buckets = [lines[at : at + size] for at in range(0, len(lines), size)]
    paces = (line.get("elapsed_time_per_iteration_ms") for line in lines)
    hours = list(accumulate(pace / 3.6e6 if is_number(pace) else 0.0 for pace in paces))
    middles = [at + (len(bucket) - 1) // 2 for at, bucket in zip(range(0, len(lines), size), buckets)]
    x = {
        "steps": [lines[at]["iteration"] for at in middles],
        "tokens": [lines[at]["consumed_tokens"] for at in middles],
        "hours": [round(hours[at], 6) for at in middles],
    }
    names = dict.fromkeys(name for line in lines for name in line if name not in NOT_DRAWN)
    metrics = {name: _curve(name, buckets) for name in names if _is_drawn(name, numbers(lines, name))}
    return {"x": x, "metrics": metrics}


def _is_drawn(name: str, values: Sequence[float]) -> bool:
    """Return whether a curve is informative: metrics of the data, such as the batch size, only if they change."""
    return len(set(values)) > 1 or (len(values) > 0 and _group(name) != "data")


def _curve(name: str, buckets: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    groups = [numbers(bucket, name) for bucket in buckets]
    curve: dict[str, Any] = {"group": _group(name), "y": [_rounded(sum, group, len(group)) for group in groups]}
    if max(map(len, groups)) > 1:
        curve |= {"low": [_rounded(min, group) for group in groups], "high": [_rounded(max, group) for group in groups]}
    return curve


def _group(name: str) -> str:
    return tag_of(name).split("/")[0]


def _rounded(function: Any, group: Sequence[float], divisor: int = 1) -> float | None:
    """Return `function` of the group over `divisor`, with six digits, which are more than a curve shows."""
    return float(f"{function(group) / divisor:.6g}") if group else None
