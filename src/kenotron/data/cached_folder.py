"""Build a folder once and keep it: it is built under a temporary name, synced and renamed, so it is never partial.

A lock file keeps several processes from doing the same work; it is a kernel lock, which ends with its process. On a
file system without locks, all of them build, and the first rename wins.
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
    """Return the path of an entry in the cache's folder `kind`; `recipe` names everything its content depends on."""
    return cache_root() / kind / hashlib.blake2b(recipe.encode(), digest_size=16).hexdigest()


def cached_folder(
    path: Path,
    build: Callable[[Path], None],
    report: Report,
    what: str,
    overwrite: bool = False,
    is_whole: Callable[[Path], bool] = Path.is_dir,
) -> None:
    """Ensure that the folder `path` exists and is complete; if not, call ``build(temporary folder)`` and rename it.

    `overwrite` rebuilds it, unless another process has done so since this one started.
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
    """Raise an InputError of one line if the block cannot write the cache."""
    return os_errors(f"cannot write the cache {folder}", "; set KENOTRON_CACHE to a writable folder with space")


def map_cached_array(file: Path, dtype: np.dtype, length: int) -> NDArray:
    """Memory-map an array of a cache entry. Raises InputError if the file has another length."""
    size = file.stat().st_size if file.exists() else -1
    if size != length * dtype.itemsize:
        raise InputError(
            f"{file}: damaged token cache (expected {length * dtype.itemsize} bytes, found {size}); "
            f"delete {file.parent} to have it rebuilt"
        )
    return map_local_array(file, dtype, 0, length)
