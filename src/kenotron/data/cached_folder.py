"""Folders that are made once and kept: built aside, synced, and renamed, so that each is complete or missing.

A lock file keeps several processes from doing the same work; it is the kernel's lock, so a killed process leaves none.
Where a file system has no locks, all of them build, and the first rename wins.
"""

import hashlib
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, os_errors
from kenotron.storage.arrays import map_local_array
from kenotron.storage.files import cache_root, locked, publish_folder, remove_leftovers, temporary_beside
from kenotron.text.progress import Report

PROCESS_START = time.time()


def cache_entry(kind: str, recipe: str) -> Path:
    """Where the folder `kind` of the cache keeps what `recipe` names: everything that its content depends on."""
    return cache_root() / kind / hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()


def cached_folder(
    path: Path,
    build: Callable[[Path], None],
    report: Report,
    what: str,
    overwrite: bool = False,
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> None:
    """Make sure that the folder `path` exists and is complete: ``build(temporary folder)`` and a rename if not.

    `overwrite` builds it again, unless another process has done so since this one started.
    """
    if is_whole(path) and not overwrite:
        return
    with writable(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = partial(report, f"waiting for another process that is {what}")
        with locked(path.with_name(path.name + ".lock"), on_wait=waiting) as alone:
            if is_whole(path) and not (overwrite and path.stat().st_mtime < PROCESS_START):
                return
            if alone:
                remove_leftovers(path)
            folder = temporary_beside(path)
            folder.mkdir()
            try:
                build(folder)
                publish_folder(folder, path)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def writable(folder: Path) -> AbstractContextManager[None]:
    """One line for a cache that cannot be written."""
    return os_errors(f"cannot write the cache {folder}", "; set KENOTRON_CACHE to a writable folder with space")


def map_cached_array(file: Path, dtype: np.dtype, length: int) -> NDArray:
    """An array of a cache entry. Raises InputError: the file has another length."""
    size = file.stat().st_size if file.exists() else -1
    if size != length * dtype.itemsize:
        raise InputError(
            f"{file}: damaged token cache (expected {length * dtype.itemsize} bytes, found {size}); "
            f"delete {file.parent} to have it rebuilt"
        )
    return map_local_array(file, dtype, 0, length)
