"""Errors that end a command with one line, and helpers for their messages.

Every message names the key or file, says what was expected and found, and suggests the nearest valid name, if any:

    >>> nearest("hiden_size", ["hidden_size", "hidden_act"])
    "; did you mean 'hidden_size'?"
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class InputError(Exception):
    """The input is wrong (config, file, data, argument). The command line prints the message and exits with 2."""


class NotSupportedYet(InputError):
    """The input uses a known key or value that is not implemented yet."""

    def __init__(self, what: str) -> None:
        super().__init__(f"not supported yet: {what}")


class CheckpointError(InputError):
    """A checkpoint cannot be written or found, or is damaged; the message is one line that names the file."""


class RunFailed(Exception):
    """The run cannot continue; the message says why and where to look. Exit code 1."""


class PeerFailed(Exception):
    """Another rank, on `machine`, failed and reports the cause, which may be any error; this rank only exits with 1."""

    def __init__(self, cause: str, machine: str = "") -> None:
        super().__init__(cause)
        self.machine = machine


FOR_USERS = (InputError, RunFailed, PeerFailed)  # printed without a traceback, as the message is enough


@contextmanager
def os_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Convert an OSError to an InputError of `what` happened, the system's reason and a `remedy`."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what}: {error.strerror or error}{remedy}") from error


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Prefix an InputError with `key`, the config key that led to the input: ``key: no checkpoint at …``."""
    try:
        yield
    except InputError as error:
        error.args = (f"{key}: {error}",)
        raise


def first_of(problems: Sequence[str]) -> str:
    """Return the first of `problems`, with the number of the others."""
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return a "did you mean" suffix for an unknown `name` in any case; empty if no valid name is similar."""
    by_lower = {candidate.lower(): candidate for candidate in valid}
    match = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean '{by_lower[match[0]]}'?" if match else ""


def nearest_sibling(path: Path) -> str:
    """Return `nearest` for the first missing part of `path`; the path exists with the suggestion in its place."""
    whole = path = path.absolute()
    while not path.parent.exists():
        path = path.parent
    rest = whole.relative_to(path)
    # An .idx file is not a suggestion: Megatron's prefix `data` means data.bin.
    others = [entry for entry in path.parent.glob("*") if entry.name != path.name and entry.suffix != ".idx"]
    near = nearest(path.name, [entry.name for entry in others if (entry / rest).exists()])
    return near.replace("'?", f"/{rest}'?") if near and rest.parts else near


def no_such_path(where: str, path: object) -> InputError:
    """Return the error for a missing `path` of the key or option `where`. Remote folders are not listed."""
    near = "" if "://" in str(path) else nearest_sibling(Path(str(path)).expanduser())
    if any(mark in str(path) for mark in "*?["):
        near = "; patterns are not expanded: name a folder or the files"
    elif "://" not in str(path) and not Path(str(path)).expanduser().is_absolute():
        near += f" (looked for {Path(str(path)).absolute()})"
    return InputError(f"{where}: no such file or folder: {path}{near}")


def is_a_path(name_or_path: str | Path) -> bool:
    """Return whether the form of `name_or_path` rules out a name of the hub."""
    name = str(name_or_path)
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def byte_size(count: float) -> str:
    """Format a number of bytes in decimal units: 1542000 → ``1.54 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def human_format(number: float) -> str:
    """Format with three significant digits and a suffix: 2840 → 2.84K, 11.13 → 11.1, 0.000264 → 0.000264, 11.0 → 11."""
    if abs(number) < 1 or number != number or abs(number) == float("inf"):
        return f"{number:.3g}"
    value = float(f"{number:.3g}")
    for suffix in ("", "K", "M", "G", "T", "P"):
        if abs(value) < 1000 or suffix == "P":
            break
        value /= 1000
    return f"{value:f}".rstrip("0").rstrip(".") + suffix


def counted(number: int, noun: str) -> str:
    """Format a count with its noun in the singular or plural: ``1 file``, ``1,200 files``, ``2 processes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def shortest_end(path: str, others: Iterable[str]) -> str:
    """Return the fewest last parts of `path` that none of `others` ends with: ``b/r`` beside ``a/r``."""
    parts, taken = path.rstrip("/").split("/"), ["/" + other.rstrip("/") for other in others]
    ends = ("/" + "/".join(parts[-length:]) for length in range(1, len(parts) + 1))
    return next((end for end in ends if not any(other.endswith(end) for other in taken)), path).removeprefix("/")
