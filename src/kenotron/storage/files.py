"""Local files: atomic and durable writes, and locks, with one implementation of each.

    replace_file(root / "latest.txt", b"10")       # readers see the old content or the new one
    publish_folder(temporary, final)               # a folder appears only when complete
    with locked(root / ".lock", timeout=60): ...   # the kernel releases it when the process dies

A rename is atomic for other processes. After a power failure, it is so only if the file, and then the folder with its
name, were synced; hence `sync_folder` after every change of names. Errors are OSErrors, to which callers add the
context.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of a file system without locks."""


def cache_root() -> Path:
    """Return ``$KENOTRON_CACHE``, else ``~/.cache/kenotron``."""
    return Path(os.environ.get("KENOTRON_CACHE") or "~/.cache/kenotron").expanduser()


# ---- names -------------------------------------------------------------------------------------------------


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names in it are durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create `path` and its parents, and sync each name in its parent folder."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def move_aside(paths: Iterable[Path], folder: Path) -> Path:
    """Move `paths` into a new folder ``replaced-<time>`` in `folder` instead of deleting them, and return it."""
    aside = folder / f"replaced-{datetime.now():%Y%m%d_%H%M%S_%f}"
    aside.mkdir()
    for path in paths:
        path.rename(aside / path.name)
    return aside


def temporary_beside(path: Path) -> Path:
    """Return an unused name in the same folder: `10` → `10.tmp-3f9c0a1b`."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


def remove_leftovers(path: Path) -> None:
    """Remove the files that killed processes left under temporary names of `path`, whose lock the caller holds."""
    for left in [*path.parent.glob(f"{path.name}.tmp-*"), *path.parent.glob(f".trash-{path.name}-*")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


# ---- files -------------------------------------------------------------------------------------------------


def replace_file(path: Path, data: bytes, durable: bool = True, temporary: Path | None = None) -> None:
    """Replace the content of `path` atomically: write `data` under a temporary name in the same folder, and rename.

    With `durable` False it is not synced: a power failure may leave it empty or truncated. `temporary` sets the
    temporary name, so that a later try overwrites what a killed process left.
    """
    temporary = temporary or temporary_beside(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


# ---- folders -----------------------------------------------------------------------------------------------


def publish_folder(temporary: Path, final: Path) -> None:
    """Sync the files of the folder `temporary` and rename it to `final`, which it replaces.

    If another process publishes `final` first, that one stays, and `temporary` is left to the caller.
    """
    for folder, _, names in os.walk(temporary):
        for name in names:
            with open(Path(folder, name), "rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(Path(folder))
    if final.is_dir():
        remove_folder(final)
    try:
        os.rename(temporary, final)
    except OSError:
        if not final.is_dir():
            raise
    sync_folder(final.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder so that no crash leaves a partial one under its name. It may be missing already."""
    trash = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
    try:
        os.rename(path, trash)
    except FileNotFoundError:
        return
    sync_folder(path.parent)
    if trash.is_symlink():
        trash.unlink()  # a link: its target is not removed
    else:
        shutil.rmtree(trash, ignore_errors=True)


# ---- locks -------------------------------------------------------------------------------------------------


@contextmanager
def locked(file: Path, timeout: float | None = None, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the kernel's lock on `file`, which is created; yield False if the file system has no locks.

    The kernel releases the lock when its process dies, so nothing is inferred from process ids or clocks. `on_wait` is
    called once if another process holds it. Raises TimeoutError after `timeout` seconds (None: wait without limit).
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield _lock(descriptor, file, timeout, on_wait)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, file: Path, timeout: float | None, on_wait: Callable[[], None] | None) -> bool:
    deadline = None if timeout is None else time.monotonic() + timeout
    flags = fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        try:
            fcntl.flock(descriptor, flags)
            return True
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
                on_wait = None
            if deadline is None:
                flags = fcntl.LOCK_EX  # sleep in the kernel
            elif time.monotonic() >= deadline:
                raise TimeoutError(f"{file}: locked by another process for more than {timeout:g} seconds") from None
            else:
                time.sleep(0.05)
        except OSError as error:
            if error.errno in NO_LOCKS:
                return False
            raise
