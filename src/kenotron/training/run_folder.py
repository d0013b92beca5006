"""The log folder of a run: ``<logging.log_dir>/<general.run>/`` with config, metrics and TensorBoard events."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import yaml

from kenotron.checkpoint import durable
from kenotron.config import dump
from kenotron.config.errors import os_errors
from kenotron.runs.files import HISTORY, METRICS, SAMPLES
from kenotron.storage.files import move_aside
from kenotron.training.console import logger

if TYPE_CHECKING:
    from kenotron.config import Config


def log_folder(config: Config) -> Path:
    """Return the folder in which a run of this config logs."""
    return Path(config.logging.log_dir) / config.general.run


def take_log_folder(config: Config, until_end: ExitStack) -> None:
    """Create the log folder and lock it `until_end`: two runs in it would mix their metrics.

    Raises InputError if the folder or a file in it cannot be created, or if another live run logs in it.
    """
    folder = log_folder(config)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
        busy = f"general.run: another run is logging in {folder}; wait until it has ended, or set another name"
        until_end.enter_context(durable.held(folder / ".lock", durable.RELEASE_SECONDS, busy))


def open_log_folder(config: Config, continues: bool) -> None:
    """Write the resolved config to the log folder, after metrics of another run in it were moved aside.

    `continues`: the run continues from its own checkpoint. Raises InputError if the folder cannot be written.
    """
    folder = log_folder(config)
    with writing(folder):
        if not (continues and _is_of_this_run(config, folder)):
            _set_metrics_aside(folder)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")


def append_line(config: Config, file: str, line: dict[str, Any]) -> None:
    """Append a JSON object to a JSON Lines file of the log folder."""
    with (log_folder(config) / file).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def writing(path: Path) -> AbstractContextManager[None]:
    """Turn OSErrors of the block, which writes to a file or folder of the logs, into InputErrors."""
    return os_errors(f"logging.log_dir: cannot write to {path}")


def _is_of_this_run(config: Config, folder: Path) -> bool:
    """Return whether the last run that logged in `folder` has the same checkpoints folder as this run."""
    file = folder / "config.yaml"
    if not file.exists():
        return True
    try:
        saved = yaml.safe_load(file.read_text(encoding="utf-8"))["checkpoints"]["checkpoints_path"]
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError):
        return False  # not a config of a run: its metrics are moved aside
    return Path(saved).absolute() == Path(config.checkpoints.checkpoints_path).absolute()


def _set_metrics_aside(folder: Path) -> None:
    """Move an earlier run's metrics, neither deleting them nor mixing them with this run's."""
    names = METRICS, HISTORY, SAMPLES, "skipped_steps.jsonl", "nonfinite_steps.jsonl", "events.out.tfevents.*"
    files = [path for name in names for path in folder.glob(name) if path.stat().st_size > 0]
    if files:
        logger.warning("%s has metrics of an earlier run; they are now in %s", folder, move_aside(files, folder))
