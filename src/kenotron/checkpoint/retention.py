"""Retention: the checkpoints that a folder keeps.

    prune(root, Keep(last=2, every=1000))     # of 1000, 1900, 2000, 2100: 1900 goes

A checkpoint is removed by a rename to `.trash-…` first, so a crash in the middle leaves no half of one.
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
    """`prune` after a save, None to nothing; a failure, which costs space and not the run, is returned as a note."""
    try:
        if keep is not None:
            prune(root, keep)
    except (CheckpointError, OSError) as error:
        return (str(error),)
    return ()


def to_prune(root: Path | str, keep: Keep, damaged: Collection[int] = ()) -> list[CheckpointFolder]:
    """The checkpoints that retention removes, oldest first.

    It keeps what `keep` says, and the one that `latest.txt` names. A damaged folder, and what is in `damaged`, is not
    counted and never removed: its files may be all that someone has.
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
    """Those of `entries` that retention does not keep, oldest first; damaged ones are not counted, and stay."""
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
