"""The files of a run's folder ``<logging.log_dir>/<general.run>/`` that have a line for each step.

metrics.jsonl     one JSON object a step, and one an evaluation
history.jsonl     one JSON object a start or end: when, at which step; on which device, with which versions; or why
samples.jsonl     completions of `logging.sample_prompts`
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS, HISTORY, SAMPLES = "metrics.jsonl", "history.jsonl", "samples.jsonl"


def logged_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of steps in a file of JSON objects, as text and read; not those that a crash cut short or damaged."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("iteration"), int):
            yield text, line


def logged_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Each step's metrics in a file of them, with those of its evaluation, which have a line of their own."""
    steps: dict[int, dict[str, Any]] = {}
    for _, line in logged_lines(path):
        steps.setdefault(line["iteration"], {}).update(line)
    return steps


def logged_step(folder: Path, step: int) -> dict[str, Any]:
    """The metrics of `step` in the log folder of a run; empty if the step is missing."""
    return logged_steps(folder / METRICS).get(step, {})
