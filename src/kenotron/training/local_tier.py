"""`checkpoints.local`: frequent checkpoints on the machine's own disk or memory, beside the durable ones.

    checkpoints/my_run/.run                          3f9c0a1b5d2e7788: the run's id
    checkpoints/my_run/1000/                         durable: in `checkpoints_path`
    /dev/shm/kenotron/run-3f9c0a1b5d2e7788/1050/     local: the same files, the newest alone

A run resumes from its local checkpoint if that is ahead of the newest durable one. It is found by the run's id, which
is new in a new folder and after --fresh; and the durable checkpoint that it follows must still be there: who removes
1000 to go back to 500 does not want 1050. Once a newer durable one is complete, and when the run ends well, it is
removed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from kenotron.checkpoint import durable, folders, leftovers, manifest
from kenotron.config.errors import InputError
from kenotron.parallel.ranks import run_on_rank0
from kenotron.storage.files import remove_leftovers
from kenotron.training.console import logger

if TYPE_CHECKING:
    from kenotron.config import Config

FOLLOWS = "durable_step"
"""In the state of a local checkpoint: the step of the newest durable one before it; 0: there was none."""


def local_folder(config: Config) -> Path | None:
    """The folder of the run's local checkpoints; None without the key, or before the run has an id."""
    local, name = config.checkpoints.local, durable.run_id(config.checkpoint_folder)
    return None if local is None or name is None else Path(local.path) / f"run-{name}"


def both_folders(config: Config) -> list[Path]:
    """The folders in which the run has checkpoints."""
    local = local_folder(config)
    return [config.checkpoint_folder] if local is None else [config.checkpoint_folder, local]


def newest_local(config: Config, durable_one: Path | None) -> Path | None:
    """The run's local checkpoint if it is complete and ahead of `durable_one`, the newest durable one.

    Any other local one is removed. All ranks call it. Raises InputError if the folder cannot be made.
    """
    if config.checkpoints.local is None:
        return None
    root = run_on_rank0(lambda: _made(config))
    newest = folders.newest_complete(root, logger.warning)

    def choose() -> Path | None:
        chosen = newest if newest is not None and _counts(config, newest, durable_one) else None
        for entry in folders.list_checkpoints(root):
            if entry.path != chosen:
                durable.discard(entry.path)
        return chosen

    return run_on_rank0(choose)


def remove(root: Path) -> Thread:
    """Remove the run's local checkpoints: they are gone at once, their bytes when the thread that is returned ends.

    That may take seconds, for which training need not wait.
    """
    trash = root.with_name(f".trash-{root.name}-{secrets.token_hex(4)}")
    with suppress(OSError):  # there are none; or they stay, behind the durable one
        os.rename(root, trash)
    thread = Thread(target=shutil.rmtree, args=(trash, True))
    thread.start()
    return thread


def forget(config: Config) -> None:
    """Remove the run's local checkpoints and give it a new id, so that none elsewhere counts."""
    if (root := local_folder(config)) is not None and folders.list_checkpoints(root):
        remove(root).join()
        logger.warning("--fresh: the local checkpoints in %s were removed", root)
    durable.new_run_id(config.checkpoint_folder)


def _made(config: Config) -> Path:
    root = local_folder(config)
    assert root is not None, "the run has no id: choose_start is called in own_folder"
    try:  # now, not after the first steps
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"checkpoints.local.path: cannot make {root}: {error.strerror}") from error
    remove_leftovers(root)
    leftovers.tidy(root, logger.warning)
    return root


def _counts(config: Config, path: Path, durable_one: Path | None) -> bool:
    """Whether the run goes on from the local checkpoint `path`."""
    saved, root = manifest.read_manifest(path), config.checkpoint_folder
    if durable_one is not None and saved.step <= int(durable_one.name):
        return False
    follows, end = saved.state.get(FOLLOWS, 0), saved.state.get("schedule_start", 0) + config.tokens.train_steps
    if follows and not (root / str(follows)).exists():
        logger.warning(
            "skipping local checkpoint %s: it follows checkpoint %d, which is not in %s", path, follows, root
        )
        return False
    if saved.step >= end:  # tokens.train_steps is lower than it was
        logger.warning("skipping local checkpoint %s: the run ends at step %d", path, end)
        return False
    return True
