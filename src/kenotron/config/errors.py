"""What went wrong with the user's input, in one line.

Every message names the key or file, says what was expected and what was found, and offers the nearest
valid name where there is one:

    >>> nearest("hiden_size", ["hidden_size", "hidden_act"])
    "; did you mean 'hidden_size'?"
    >>> nearest("zzz", ["hidden_size"])
    ''
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class InputError(Exception):
    """The input is wrong (config, file, data, argument). The command line prints it and exits with 2."""


class NotSupportedYet(InputError):
    """The schema knows this value, but no code serves it yet."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not supported yet: {what}")


def nearest(name: str, valid: Iterable[str]) -> str:
    """A "did you mean" suffix for an unknown `name`, or nothing when no valid name is near."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


def nearest_sibling(path: Path) -> str:
    """`nearest` of what lies in the folder where `path` is not."""
    return nearest(path.name, [sibling.name for sibling in path.absolute().parent.glob("*")])


def no_such_path(where: str, path: object) -> InputError:
    """The error for a `path` that is not there, which `where` names; nothing is listed on other machines."""
    near = "" if "://" in str(path) else nearest_sibling(Path(str(path)).expanduser())
    return InputError(f"{where}: no such file or folder: {path}{near}")


def counted(number: int, noun: str) -> str:
    """``1 file``, ``1,200 files``: a count as the console tells it."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
