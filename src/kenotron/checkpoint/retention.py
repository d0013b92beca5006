"""What leaves a checkpoint folder: steps that the retention rule removes, and what killed processes left.

    prune(root, keep_last=2, keep_every=1000)     # of 1000, 1900, 2000, 2100: 1900 goes
    tidy(root)                                    # at the start of a run

A checkpoint is removed by a rename to `.trash-…` first, so a crash in the middle leaves no half of one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from kenotron.checkpoint.durable import FolderBusy, discard, locked
from kenotron.checkpoint.folders import LATEST, Found, Report, list_checkpoints, look, publish, quiet
from kenotron.config.errors import CheckpointError

_TEMPORARY = re.compile(r"(\d+|latest\.txt)\.tmp-[0-9a-f]{8}")
_TRASH = re.compile(r"\.trash-\d+-[0-9a-f]{8}")


def prune(
    root: Path | str, keep_last: int | None, keep_every: int | None = None, protect: Iterable[int] = ()
) -> list[Path]:
    """Remove the checkpoints that `to_prune` names and return their paths.

    In a run, rank 0 alone calls it.
    """
    doomed = [entry.path for entry in to_prune(root, keep_last, keep_every, protect)]
    for path in doomed:
        discard(path)
    return doomed


def to_prune(
    root: Path | str, keep_last: int | None, keep_every: int | None = None, protect: Iterable[int] = ()
) -> list[Found]:
    """The checkpoints that retention removes, oldest first.

    Kept are the `keep_last` that were saved last (None: all), every step that `keep_every` divides, the steps
    in `protect`, and the one that `latest.txt` names. A damaged folder counts for nothing and is never
    removed: its files may be all that someone has.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise CheckpointError(f"{name} must be at least 1; found {value}")
    if keep_last is None:
        return []
    kept = set(protect)
    latest = Path(root) / LATEST
    if latest.exists() and (text := latest.read_text().strip()).isdigit():
        kept.add(int(text))
    complete = {entry.step: entry for entry in list_checkpoints(root) if entry.manifest}
    return [complete[step] for step in superseded(list(complete), keep_last, keep_every, kept)]


def superseded(steps: list[int], keep_last: int, keep_every: int | None, kept: Collection[int]) -> list[int]:
    """Those of `steps`, the last saved last, that retention does not keep; `kept` are kept besides."""
    return [step for step in steps[:-keep_last] if step not in kept and not (keep_every and step % keep_every == 0)]


def tidy(root: Path | str, report: Report = quiet) -> None:
    """Clear what killed processes left in `root`: rank 0 calls it at the start, before `newest_complete`.

    A save that was complete but for its rename is finished; other temporary folders and half-removed
    checkpoints are deleted. While another process saves there, nothing is touched.

    Raises:
        CheckpointError: this process may not write there; better known now than at the first save.
    """
    root = Path(root)
    if not root.is_dir():
        return
    try:
        with locked(root, wait_seconds=0) as held:
            if held:
                clear_leftovers(root, report)
    except FolderBusy:
        report(f"another process is saving into {root}; its files are left alone")


def clear_leftovers(root: Path, report: Report) -> None:
    """`tidy` for a caller that holds the folder's lock."""
    for path in sorted(root.iterdir()):
        if _TRASH.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif match := _TEMPORARY.fullmatch(path.name):
            _clear(path, root / match[1], report)


def _clear(path: Path, final: Path, report: Report) -> None:
    if path.is_file():
        path.unlink(missing_ok=True)
    elif not final.exists() and look(path, int(final.name)).manifest:
        publish(path, final)
        report(f"finished the save of step {final.name}, which was complete but for its name")
    else:
        shutil.rmtree(path, ignore_errors=True)
        report(f"removed {path.name}, which a killed process left")
