"""Compute steps of a finished run again, and compare them with its log: `kenotron replay` and `kn.replay`.

A replay starts from the nearest checkpoint before the step. On the same layout, losses, gradient norms and hashes of
the weights are bitwise equal; on another layout losses and norms agree up to rounding. The cause of a difference is a
transient fault, a changed token file or another version of a library. The run and its checkpoints are only read.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from kenotron.checkpoint.folders import CheckpointFolder, list_checkpoints, quiet, resolve, verify
from kenotron.config import Config, load
from kenotron.config.errors import InputError, counted, first_of
from kenotron.config.overrides import check_overrides
from kenotron.config.packaged import packaged_yaml
from kenotron.config.resolved import read_resolved
from kenotron.config.writing import inline, to_dict
from kenotron.data import open_run
from kenotron.launch import launch
from kenotron.launch.comparing import check_count, on_layout
from kenotron.launch.data_which import describe_step, start_of
from kenotron.launch.environment import ranks_from_environment
from kenotron.runs.files import logged_steps
from kenotron.text.progress import Report

COMPARED = ("lm_loss", "grad_norm", "state_hash", "lr")
FIXED = ("general.run", "tokens.train_steps")  # a replay needs the run's values of these keys
ROUNDING = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}  # relative, of a loss or norm on another layout


@dataclass(frozen=True)
class Replayed:
    """The result of a replay of steps `first` to `last`, of which `compared` are in the log.

    `rounding` is the relative tolerance (0.0: every bit). `differences` has a line for each number of the first step
    that differs, and `reads` the lines of the samples that it reads.
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

    The replay starts from the nearest checkpoint before `step`; `overrides` select another layout. `log_dir` is the
    run's log folder, if it was moved. `verified` returns the problems of a checkpoint. Return None on ranks of torchrun
    other than 0.

    Raises InputError if there is no checkpoint, the step is not in the log, or overrides change more than the layout.
    """
    check_overrides(overrides)
    check_count("step", step)
    config, checkpoint = _find(Path(checkpoints), step, verified)
    start = start_of(config, checkpoint)
    log = (Path(log_dir) if log_dir else Path(config.logging.log_dir) / config.general.run) / "metrics.jsonl"
    logged = _metrics(log)
    if step not in logged:
        steps = f"{min(logged)} to {max(logged)}" if logged else "none"
        raise InputError(f"--step: expected a step of the log, which has {steps}, found {step}")
    first, is_rank_0 = checkpoint.step + 1 if checkpoint else 1, ranks_from_environment().rank == 0
    with tempfile.TemporaryDirectory(prefix="kenotron-replay-") as temporary:
        again = config_of_replay(config, Path(temporary), step, overrides)
        if checkpoint is not None:
            _link(checkpoint.path, Path(again.checkpoints.checkpoints_path))
        if is_rank_0:
            say(f"computing {counted(step + 1 - first, 'step')} from {checkpoint.path if checkpoint else 'the start'}")
        launch(again)
        if not is_rank_0:
            return None
        replayed = _metrics(Path(again.logging.log_dir) / again.general.run / "metrics.jsonl")
    other_layout = any(not override.startswith("profiler") for override in overrides)
    rounding = ROUNDING[again.model.dtype] if other_layout else 0.0
    compared, differences = _compare(logged, replayed, range(first, step + 1), rounding)
    if not compared and not differences:
        raise InputError(f"{log}: expected {', '.join(COMPARED)} of steps {first} to {step}, found none of them")
    reads: list[str] = []
    if differences:
        with open_run(start.in_run_steps(config), step, quiet, held_out=start.held_out) as data:
            reads = describe_step(data, int(differences[0].split()[1].rstrip(":")))[1]
    return Replayed(first, step, compared, rounding, differences, reads)


def _find(
    checkpoints: Path, step: int, verified: Callable[[CheckpointFolder], list[str]]
) -> tuple[Config, CheckpointFolder | None]:
    """Return the run's config at `step`, and the newest intact checkpoint before it, or None for the start of the run.

    A run may be resumed with other settings, so the config is that of the first checkpoint at or after `step`.
    """
    complete = [entry for entry in list_checkpoints(checkpoints) if entry.problem is None]
    if not complete:  # `resolve` raises, and says what is there, unless it is one of the run's checkpoints
        return _find(resolve(checkpoints).parent, step, verified)
    before = sorted((entry for entry in complete if entry.step < step), key=lambda entry: -entry.step)
    after = [entry for entry in complete if entry.step >= step] or complete[-1:]
    config = read_resolved(min(after, key=lambda entry: entry.step).path / "config.yaml")
    for entry in before:
        problems = verified(entry) if ranks_from_environment().rank == 0 else []
        if not problems:
            return config, entry
        print(f"warning: skipping checkpoint {entry.step}: {first_of(problems)}", file=sys.stderr)
    if config.checkpoints.resume_checkpoint_path is not None:
        raise InputError(f"{checkpoints}: no intact checkpoint before step {step}; the oldest is {complete[0].step}")
    return config, None


def config_of_replay(config: Config, folder: Path, step: int, overrides: Sequence[str]) -> Config:
    """Return `config` with its files in `folder`, and with a hook that stops after `step`.

    Raises InputError for an override of a key that the replay sets or needs.
    """
    hooks = [*(to_dict(config)["general"].get("hooks") or [])]
    hooks.append({"path": "kenotron.observers.replay.StopAfter", "kwargs": {"step": step}})
    folders = {"checkpoints.checkpoints_path": str(folder / "checkpoints"), "logging.log_dir": str(folder / "logs")}
    changes: dict[str, Any] = {"general.hooks": hooks} | folders | packaged_yaml("kenotron.launch", "replay.yaml")
    keys = [override.partition("=")[0] for override in overrides]
    if any(key.startswith("profiler") for key in keys):
        del changes["profiler"]
    for key, fixed in product(keys, (*changes, *FIXED)):
        if f"{fixed}.".startswith(f"{key}.") or key.startswith(f"{fixed}."):
            raise InputError(f"override {key}: a replay sets {fixed} itself; expected another layout, or profiler")
    other = on_layout(config, config, overrides, say=lambda line: print(line, file=sys.stderr))
    return load(other, [f"{key}={inline(value)}" for key, value in changes.items()])


def _link(checkpoint: Path, folder: Path) -> None:
    """Copy the checkpoint to `folder`, by hard links if the file system allows it."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=link)


def _metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Return step → line of a run's metrics."""
    if not path.exists():
        raise InputError(f"no file {path}; --log-dir names the folder of the run's metrics.jsonl")
    return logged_steps(path)


def _compare(
    logged: dict[int, dict[str, Any]], replayed: dict[int, dict[str, Any]], steps: range, rounding: float
) -> tuple[int, list[str]]:
    """Return the number of compared steps, up to the first that differs, and a line for each of its differences."""
    compared = 0
    for step in steps:
        before, now = logged.get(step, {}), replayed.get(step, {})
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
