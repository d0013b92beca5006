"""The JSON Lines files of a run's folder ``<logging.log_dir>/<general.run>/``, whose lines have a step.

metrics.jsonl     one line per step, and one per evaluation
history.jsonl     one line per start (time, step, device, versions) and per end (time, step, reason)
samples.jsonl     completions of `logging.sample_prompts`
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS, HISTORY, SAMPLES = "metrics.jsonl", "history.jsonl", "samples.jsonl"


def logged_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (text, object) of the lines of a JSON Lines file; skip lines that a crash has truncated or damaged."""
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("iteration"), int):
            yield text, line


def logged_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Read step → metrics from a file, including metrics of its evaluation, which are on a separate line."""
    steps: dict[int, dict[str, Any]] = {}
    for _, line in logged_lines(path):
        steps.setdefault(line["iteration"], {}).update(line)
    return steps


def logged_step(folder: Path, step: int) -> dict[str, Any]:
    """Read the metrics of `step` from the log folder of a run; empty if the step is missing."""
    return logged_steps(folder / METRICS).get(step, {})
