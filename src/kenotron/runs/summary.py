"""Summarize a run in one line from its files: its state, its steps, its losses."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from kenotron.config.errors import InputError, no_such_path
from kenotron.runs.files import METRICS
from kenotron.runs.logged import LoggedRun, read_runs

SILENT_STEPS, SILENT_S = 20, 120
"""A started run without an end counts as killed after this many steps and seconds without a line."""


@dataclass(frozen=True)
class Summary:
    """A run's numbers; None if unknown. `state` is running, finished, stopped, failed or killed.

    `loss` is the mean of the last twentieth of the steps, at most 100, and `val_loss` the last one, in nats per token.
    """

    name: str
    state: str
    reason: str | None  # for which it stopped or failed
    step: int
    end: int | None  # the last step that is planned
    tokens: int
    loss: float | None
    val_loss: float | None
    tokens_per_sec: float | None  # the median
    seconds: float  # of all steps
    written_at: float  # seconds since 1970


def summary_of(run: LoggedRun) -> Summary:
    """Summarize a run."""
    lines = list(run.steps.values())
    history = run.history
    written_at = (run.folder / METRICS).stat().st_mtime
    paces = numbers(lines, "elapsed_time_per_iteration_ms")
    losses = numbers(lines, "lm_loss")
    last = losses[-min(100, math.ceil(len(losses) / 20)) :] if losses else []
    silent_s = max(SILENT_S, SILENT_STEPS * (median(paces) / 1000 if paces else 0))
    step = max(run.steps, default=0)
    end = run.last_start.get("last_step", run.setting("tokens.train_steps"))
    state = history[-1]["event"] if history else "start"
    if not history and step == end:
        state = "finished"
    elif state == "start":
        state = "running" if time.time() - written_at < silent_s else "killed"
    speeds = numbers(lines, "tokens_per_sec")
    return Summary(
        name=run.name,
        state=state,
        reason=history[-1].get("reason") if history else None,
        step=step,
        end=end,
        tokens=int(lines[-1]["consumed_tokens"]) if lines else 0,
        loss=sum(last) / len(last) if last else None,
        val_loss=next(reversed(numbers(lines, "val_loss")), None),
        tokens_per_sec=median(speeds) if speeds else None,
        seconds=sum(paces) / 1000,
        written_at=written_at,
    )


def numbers(lines: Iterable[dict[str, Any]], name: str) -> list[float]:
    """Return the finite values of a metric, in the order of the lines."""
    return [float(line[name]) for line in lines if is_number(line.get(name))]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a logged value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def find_runs(folders: Iterable[Path]) -> list[LoggedRun]:
    """Find the runs below `folders`, the newest last, by their paths from there.

    Raises InputError if a folder is missing or has no runs.
    """
    below: dict[Path, str] = {}
    for folder in folders:
        if not folder.exists():
            raise no_such_path("FOLDER", folder)
        found = [file.absolute().parent for file in sorted(folder.rglob(METRICS))]
        if not found:
            raise InputError(f"{folder}: expected runs, folders with {METRICS}, such as logging.log_dir has them")
        below |= {path: path.relative_to(folder.absolute()).as_posix() for path in found}
    # Of two ends of a path the longer one is unique, too.
    runs = [replace(run, name=max(run.name, below[run.folder], key=len)) for run in read_runs(below)]
    return sorted(runs, key=lambda run: (run.folder / METRICS).stat().st_mtime)
