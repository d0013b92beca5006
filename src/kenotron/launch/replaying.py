"""Steps of a finished run, computed once more: `kenotron replay` and `kn.replay`.

From the nearest checkpoint before the step, on the same layout, losses, gradient norms and hashes of the weights are
equal bit by bit; on another layout losses and norms agree up to rounding. Where they first differ, a transient fault,
a changed file of tokens or another version of a library is the cause. The run and its checkpoints are only read.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron.checkpoint.folders import CheckpointFolder, list_checkpoints, quiet, verify
from kenotron.config import Config, load
from kenotron.config.errors import InputError, counted, first_of
from kenotron.config.packaged import packaged_yaml
from kenotron.config.resolved import read_resolved
from kenotron.config.writing import inline, to_dict
from kenotron.data import open_run
from kenotron.launch import launch
from kenotron.launch.comparing import on_layout
from kenotron.launch.data_which import of_step, start_of
from kenotron.launch.environment import ranks_from_environment
from kenotron.runs.files import logged_steps
from kenotron.text.progress import Report

COMPARED = ("lm_loss", "grad_norm", "state_hash", "lr")
OWN = ("general.run", "tokens.train_steps")  # a replay needs the run's values of these
ROUNDING = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}  # of a loss or norm on another layout


@dataclass(frozen=True)
class Replayed:
    """Steps `first` to `last`, of which `compared` are in the log, up to `rounding` (relative; 0.0: every bit).

    `differences`: a line for each number of the first step that differs; `reads`: what that step reads.
    """

    first: int
    last: int
    compared: int
    rounding: float
    differences: list[str]
    reads: list[str]

    @property
    def equal(self) -> bool:
        """Whether no number differs."""
        return not self.differences


def replay(
    checkpoints: str | Path,
    step: int,
    overrides: Sequence[str] = (),
    *,
    log_dir: str | Path | None = None,
    say: Report = lambda line: print(line, flush=True),
    verified: Callable[[CheckpointFolder], list[str]] = lambda entry: verify(entry.path),
) -> Replayed | None:
    """Compute the steps up to `step` of the run in `checkpoints` again, and compare them with its log.

    From the nearest checkpoint before it; `overrides` give another layout. `log_dir`: the run's log folder, if it was
    moved. `verified` returns what is wrong with a checkpoint. None on a rank of torchrun that is not the first.

    Raises InputError: no checkpoint, a step that is not in the log, overrides that are no layout.
    """
    config, start = _find(Path(checkpoints), step, verified)
    begun = start_of(config, start)
    log = (Path(log_dir) if log_dir else Path(config.logging.log_dir) / config.general.run) / "metrics.jsonl"
    logged = _metrics(log)
    if step not in logged:
        has = f"{min(logged)} to {max(logged)}" if logged else "none"
        raise InputError(f"--step: expected a step of the log, which has {has}, found {step}")
    first, speaks = start.step + 1 if start else 1, ranks_from_environment().rank == 0
    with tempfile.TemporaryDirectory(prefix="kenotron-replay-") as temporary:
        again = config_of_replay(config, Path(temporary), step, overrides)
        if start is not None:
            _link(start.path, Path(again.checkpoints.checkpoints_path))
        if speaks:
            say(f"computing {counted(step + 1 - first, 'step')} from {start.path if start else 'the start'}")
        launch(again)
        if not speaks:
            return None
        found = _metrics(Path(again.logging.log_dir) / again.general.run / "metrics.jsonl")
    other_layout = any(not override.startswith("profiler") for override in overrides)
    rounding = ROUNDING[again.model.dtype] if other_layout else 0.0
    compared, differences = _compare(logged, found, range(first, step + 1), rounding)
    if not compared and not differences:
        raise InputError(f"{log}: expected {', '.join(COMPARED)} of steps {first} to {step}, found none of them")
    reads: list[str] = []
    if differences:
        with open_run(begun.in_run_steps(config), step, quiet, held_out=begun.held_out) as data:
            reads = of_step(data, int(differences[0].split()[1].rstrip(":")))[1]
    return Replayed(first, step, compared, rounding, differences, reads)


def _find(
    checkpoints: Path, step: int, verified: Callable[[CheckpointFolder], list[str]]
) -> tuple[Config, CheckpointFolder | None]:
    """The run's config at `step`, and the newest intact checkpoint before it; None where the run's start is nearer.

    A run may continue with other settings: a step's are those of the next checkpoint after it.
    """
    found = [entry for entry in list_checkpoints(checkpoints) if entry.problem is None]
    if not found:
        raise InputError(f"{checkpoints}: expected a run's folder of checkpoints, found no complete checkpoint")
    before = sorted((entry for entry in found if entry.step < step), key=lambda entry: -entry.step)
    after = [entry for entry in found if entry.step >= step] or found[-1:]
    config = read_resolved(min(after, key=lambda entry: entry.step).path / "config.yaml")
    for entry in before:
        problems = verified(entry) if ranks_from_environment().rank == 0 else []
        if not problems:
            return config, entry
        print(f"warning: skipping checkpoint {entry.step}: {first_of(problems)}", file=sys.stderr)
    if config.checkpoints.resume_checkpoint_path is not None:
        raise InputError(f"{checkpoints}: no intact checkpoint before step {step}; the oldest is {found[0].step}")
    return config, None


def config_of_replay(config: Config, folder: Path, step: int, overrides: Sequence[str]) -> Config:
    """`config` with its files in `folder`, until `step`.

    Raises InputError for an override that would lead it to the run's own files.
    """
    hooks = [*(to_dict(config)["general"].get("hooks") or [])]
    hooks.append({"path": "kenotron.observers.replay.StopAfter", "kwargs": {"step": step}})
    folders = {"checkpoints.checkpoints_path": str(folder / "checkpoints"), "logging.log_dir": str(folder / "logs")}
    changes: dict[str, Any] = {"general.hooks": hooks} | folders | packaged_yaml("kenotron.launch", "replay.yaml")
    keys = [override.partition("=")[0] for override in overrides]
    if any(key.startswith("profiler") for key in keys):
        del changes["profiler"]
    for key in keys:
        if own := [each for each in (*changes, *OWN) if f"{each}.".startswith(f"{key}.") or key.startswith(f"{each}.")]:
            raise InputError(f"override {key}: a replay sets {own[0]} itself; expected another layout, or profiler")
    other = on_layout(config, config, overrides, say=lambda line: print(line, file=sys.stderr))
    return load(other, [f"{key}={inline(value)}" for key, value in changes.items()])


def _link(checkpoint: Path, folder: Path) -> None:
    """The checkpoint in `folder` as well, without a copy of its bytes where the file system can."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=link)


def _metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a run's metrics by their steps."""
    if not path.exists():
        raise InputError(f"no file {path}; --log-dir names the folder of the run's metrics.jsonl")
    return logged_steps(path)


def _compare(
    logged: dict[int, dict[str, Any]], found: dict[int, dict[str, Any]], steps: range, rounding: float
) -> tuple[int, list[str]]:
    """How many of the steps could be compared, up to the first that differs; and a line for each of its numbers."""
    compared = 0
    for step in steps:
        before, now = logged.get(step, {}), found.get(step, {})
        names = [name for name in COMPARED if name in before and not (rounding and name == "state_hash")]
        compared += bool(names)
        lines = [
            f"step {step}: {name} was {before[name]!r} and is {now.get(name)!r}"
            for name in names
            if not _equal(before[name], now.get(name), rounding)
        ]
        if lines and rounding:
            lines.append(f"on another layout, rounding explains differences of up to {rounding:g} of a number")
        if lines:
            return compared, lines
    return compared, []


def _equal(before: float | None, now: float | None, rounding: float) -> bool:
    if not rounding or before is None or now is None:
        return before == now
    return abs(before - now) <= rounding * max(abs(before), 1e-30)
