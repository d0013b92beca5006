"""Output that is complete or absent: made in a hidden folder beside it, and renamed.

with scratch_beside(Path("all")) as folder:      # .all.unfinished
    write(folder / "00000.ds")
    publish_folder(folder, Path("all"))
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kenotron.config.errors import InputError


@contextmanager
def scratch_beside(output: Path, key: str = "--output") -> Iterator[Path]:
    """A hidden folder beside `output`, for the caller to publish; removed at the end.

    Raises InputError: `output` exists and is not an empty folder; what the system refuses meanwhile, a full disk.
    """
    if not output.name:
        raise InputError(f"{key}: expected a folder to be created, found {output}")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"{key}: {output} already exists; choose another one or remove it")
    folder = output.with_name(f".{output.name}.unfinished")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        other = str(error.filename or folder)
        at = "" if other.startswith((str(folder), str(output))) else f"{other}: "
        raise InputError(f"{key}: cannot create {output}: {at}{error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
