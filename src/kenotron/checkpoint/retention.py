"""Retention removes the checkpoints that a folder need not keep.

    prune(root, Keep(last=2, every=1000))     # of 1000, 1900, 2000, 2100: 1900 goes

A checkpoint is renamed to `.trash-…` before it is removed, so a crash leaves no partial checkpoint.
"""

import math
from collections.abc import Collection, Iterable
from pathlib import Path

from kenotron.checkpoint.durable import discard
from kenotron.checkpoint.engine import Keep
from kenotron.checkpoint.folders import LATEST, CheckpointFolder, Listed, Place, list_checkpoints, oldest_first
from kenotron.config.errors import CheckpointError


def prune(root: Path | str, keep: Keep) -> list[Path]:
    """Remove the checkpoints that `to_prune` names and return their paths.

    In a run, rank 0 alone calls it.
    """
    doomed = [entry.path for entry in to_prune(root, keep)]
    for path in doomed:
        discard(path)
    return doomed


def prune_if_possible(root: Path, keep: Keep | None) -> tuple[str, ...]:
    """Call `prune` after a save, unless `keep` is None; return a failure, which only costs space, as a note."""
    try:
        if keep is not None:
            prune(root, keep)
    except (CheckpointError, OSError) as error:
        return (str(error),)
    return ()


def to_prune(root: Path | str, keep: Keep, damaged: Collection[int] = ()) -> list[CheckpointFolder]:
    """Return the checkpoints that retention removes, oldest first.

    The one that `latest.txt` names is kept besides those of `keep`. Damaged folders, and the steps in `damaged`, are
    not counted and never removed: their files may be all that a user has left.
    """
    for name, value in (("keep_last", keep.last), ("keep_every", keep.every)):
        if value is not None and value < 1:
            raise CheckpointError(f"{name} must be at least 1; found {value}")
    latest = Path(root) / LATEST
    if latest.exists() and (text := latest.read_text(errors="replace").strip()).isdigit():
        keep = keep._replace(protected=keep.protected | {int(text)})
    sound = [entry for entry in list_checkpoints(root) if entry.step not in damaged]
    return superseded(sound, keep)


def superseded(entries: Iterable[Listed[Place]], keep: Keep) -> list[Listed[Place]]:
    """Return the `entries` that retention does not keep, oldest first; damaged ones are not counted, and kept."""
    complete = [entry for entry in oldest_first(entries) if entry.manifest]
    protected = keep.protected
    if keep.best:
        losses = {entry.step: entry.manifest.state.get("val_loss") for entry in complete if entry.manifest}
        finite: dict[int, float] = {
            step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)
        }
        protected = protected.union(sorted(finite, key=finite.__getitem__)[:1])
    old = complete[: -keep.last] if keep.last is not None else []
    return [entry for entry in old if entry.step not in protected and not (keep.every and entry.step % keep.every == 0)]
