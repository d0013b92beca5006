"""`kenotron replay CHECKPOINTS --step 1234`: compute steps of a finished run once more, and compare every number.

From the nearest checkpoint before the step, on the same layout, losses, gradient norms and hashes of the weights are
equal bit by bit; on another layout (overrides) losses and norms agree up to rounding. Where they first differ, a
transient fault, a changed file of tokens or another version of a library is the cause. The run and its checkpoints are
only read.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kenotron.cli.rank0 import on_rank_0
from kenotron.config.errors import InputError, counted

if TYPE_CHECKING:
    from kenotron.checkpoint.folders import CheckpointFolder
    from kenotron.config import Config

COMPARED = ("lm_loss", "grad_norm", "state_hash", "lr")
OWN = ("general.run", "tokens.train_steps")  # a replay needs the run's values of these
ROUNDING = {"float32": 1e-4, "bfloat16": 2e-2}  # of a loss or norm on another layout


def replay(
    checkpoints: Annotated[Path, typer.Argument(help="The run's folder of checkpoints.")],
    step: Annotated[int, typer.Option(help="The last step to compute again.", min=1)],
    overrides: Annotated[list[str] | None, typer.Argument(help="Another layout, such as parallelism.tp=2.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="The run's log folder, if it was moved.")] = None,
) -> None:
    """Compute a step of a run again from the checkpoint before it, and compare it with the log.

    Exit code 0: the numbers are equal; 1: they are not.
    """
    from kenotron.cli.data_which import of_step, start_of
    from kenotron.data import open_run
    from kenotron.launch import launch

    config, start = _find(checkpoints, step)
    begun = start_of(config, start)
    read = partial(open_run, begun.in_run_steps(config), report=lambda line: None, held_out=begun.held_out)
    log = (log_dir or Path(config.logging.log_dir) / config.general.run) / "metrics.jsonl"
    logged = _metrics(log)
    if step not in logged:
        raise InputError(f"--step: expected a step of the log, which has {_range(logged)}, found {step}")
    with tempfile.TemporaryDirectory(prefix="kenotron-replay-") as temporary:
        again = _config(config, Path(temporary), step, overrides or [])
        if start is not None:
            _link(start.path, Path(again.checkpoints.checkpoints_path))
        first = start.step + 1 if start else 1
        if on_rank_0():
            where = start.path if start else "the start"
            print(f"computing {counted(step + 1 - first, 'step')} from {where}", flush=True)
        launch(again)
        if not on_rank_0():
            return
        found = _metrics(Path(again.logging.log_dir) / again.general.run / "metrics.jsonl")
    other_layout = any(not override.startswith("profiler") for override in overrides or ())
    rounding = ROUNDING[again.model.dtype] if other_layout else 0.0
    steps = range(first, step + 1)
    compared, differences = _compare(logged, found, steps, rounding)
    if differences:
        print("\n".join(differences))
        if any(": lr was " in line for line in differences):
            print("the run later continued with another schedule: its settings at that step are no longer known")
        with read(step) as data:
            print("\n".join(of_step(data, int(differences[0].split()[1].rstrip(":")))[1]))
        sys.exit(1)
    if not compared:
        raise InputError(f"{log}: expected {', '.join(COMPARED)} of steps {first} to {step}, found none of them")
    some = f"; the log has {compared} of these {len(steps)} steps" if compared < len(steps) else ""
    verdict = "equal up to rounding" if rounding else "every number is equal"
    print(f"steps {first} to {step}: {verdict}{some}")


def _find(checkpoints: Path, step: int) -> tuple[Config, CheckpointFolder | None]:
    """The run's config at `step`, and the newest intact checkpoint before it; None where the run's start is nearer.

    A run may continue with other settings: a step's are those of the next checkpoint after it.
    """
    from kenotron.checkpoint.folders import first_of, list_checkpoints, verify
    from kenotron.cli.checkpoint import verify_one
    from kenotron.config.resolved import read_resolved

    found = [entry for entry in list_checkpoints(checkpoints) if entry.problem is None]
    if not found:
        raise InputError(f"{checkpoints}: expected a run's folder of checkpoints, found no complete checkpoint")
    before = sorted((entry for entry in found if entry.step < step), key=lambda entry: -entry.step)
    after = [entry for entry in found if entry.step >= step] or found[-1:]
    config = read_resolved(min(after, key=lambda entry: entry.step).path / "config.yaml")
    for entry in before:
        check = partial(verify, entry.path)
        problems = verify_one(str(entry.path), check, show_progress=True) if on_rank_0() else []
        if not problems:
            return config, entry
        print(f"warning: skipping checkpoint {entry.step}: {first_of(problems)}", file=sys.stderr)
    if config.checkpoints.resume_checkpoint_path is not None:
        raise InputError(f"{checkpoints}: no intact checkpoint before step {step}; the oldest is {found[0].step}")
    return config, None


def _config(config: Config, folder: Path, step: int, overrides: list[str]) -> Config:
    """`config` with its files in `folder`, until `step`.

    Raises InputError for an override that would lead it to the run's own files.
    """
    from kenotron.cli.compare import at_one_batch_size
    from kenotron.config import load
    from kenotron.config.writing import inline, to_dict

    hooks = [*(to_dict(config)["general"].get("hooks") or [])]
    hooks.append({"path": "kenotron.observers.replay.StopAfter", "kwargs": {"step": step}})
    changes: dict[str, Any] = {
        "general.hooks": hooks,
        "checkpoints.checkpoints_path": str(folder / "checkpoints"),
        "checkpoints.keep_last": 1,
        "checkpoints.local": None,
        "checkpoints.staging_path": None,
        "checkpoints.remove_after_upload": False,
        "s3_upload": None,  # a replay writes to no store, and keeps and removes nothing there
        "general.benchmark_csv_path": None,
        "profiler": None,
        "checkpoints.export_hf": False,
        "tokens.val_check_interval": -1,
        "tokens.limit_val_batches": 0,
        "logging.log_dir": str(folder / "logs"),
        "logging.log_level": "warning",
        "logging.tensorboard": False,
    }
    keys = [override.partition("=")[0] for override in overrides]
    if any(key.startswith("profiler") for key in keys):
        del changes["profiler"]
    for key in keys:
        if own := [each for each in (*changes, *OWN) if f"{each}.".startswith(f"{key}.") or key.startswith(f"{each}.")]:
            raise InputError(f"override {key}: a replay sets {own[0]} itself; expected another layout, or profiler")
    overrides = at_one_batch_size(config, config, overrides)
    return load(config, [*overrides, *(f"{key}={inline(value)}" for key, value in changes.items())])


def _link(checkpoint: Path, folder: Path) -> None:
    """The checkpoint in `folder` as well, without a copy of its bytes where the file system can."""
    import shutil

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)

    shutil.copytree(checkpoint, folder / checkpoint.name, copy_function=link)


def _metrics(path: Path) -> dict[int, dict[str, Any]]:
    """The lines of a run's metrics by their steps."""
    from kenotron.training.metrics import logged_lines

    if not path.exists():
        raise InputError(f"no file {path}; --log-dir names the folder of the run's metrics.jsonl")
    return {line["iteration"]: line for _, line in logged_lines(path)}


def _range(logged: dict[int, dict[str, Any]]) -> str:
    return f"{min(logged)} to {max(logged)}" if logged else "none"


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
