"""Output that is complete or absent: made in a hidden folder beside it, and renamed.

with scratch_beside(Path("all")) as folder:      # .all.unfinished
    write(folder / "00000.ds")
    publish_folder(folder, Path("all"))
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kenotron.config.errors import InputError
from kenotron.data.formats import is_one_file
from kenotron.storage.files import publish_folder, sync_folder


@contextmanager
def scratch_beside(output: Path, key: str = "--output") -> Iterator[Path]:
    """Make a hidden folder beside `output`, for the caller to publish; it is removed at the end.

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


@contextmanager
def new_token_files(output: Path) -> Iterator[tuple[Path, bool]]:
    """Make a folder for the files of `output`, and tell whether that is one file; they are published at the end.

    Raises InputError: as `scratch_beside`; a file of another format; what an earlier file of that name has left.
    """
    as_file = is_one_file(output)
    with scratch_beside(output) as scratch:
        if as_file:
            _refuse_companions(output)
        yield scratch, as_file
        if not as_file:
            publish_folder(scratch, output)
            return
        for file in sorted(scratch.iterdir(), key=lambda file: file.name == output.name):  # the tokens come last
            os.replace(file, output.parent / file.name)
        sync_folder(output.parent)


def _refuse_companions(output: Path) -> None:
    """Raise InputError if an index or a loss mask of an earlier `output` would be taken for the new one's."""
    others = output.parent.iterdir() if output.parent.is_dir() else ()
    for left in sorted(other for other in others if other.name.startswith(f"{output.name}.")):
        raise InputError(f"--output: {left} already exists, left by an earlier {output.name}; remove it")
