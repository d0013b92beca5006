"""`kenotron checkpoint`: list, verify, prune and upload checkpoints on this machine or in a store (s3://…).

    kenotron checkpoint list checkpoints
    kenotron checkpoint show checkpoints/20
    kenotron checkpoint verify checkpoints             # every byte; exit code 1 if one is damaged
    kenotron checkpoint prune checkpoints --keep-last 2 --keep-every 1000 --dry-run
    kenotron checkpoint upload checkpoints s3://bucket/run

`list` and `verify` take `--json`. Tables are printed on a terminal, plain columns elsewhere. torch is not imported.
"""

import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from kenotron.checkpoint.durable import discard, run_id
from kenotron.checkpoint.engine import Keep
from kenotron.checkpoint.folders import CheckpointFolder, RemoteCheckpoint, list_checkpoints, resolve
from kenotron.checkpoint.folders import verify as verify_checkpoint
from kenotron.checkpoint.index import DTYPES, read_index
from kenotron.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from kenotron.checkpoint.retention import superseded, to_prune
from kenotron.cli.remote import fetch_checkpoint
from kenotron.cli.tables import print_table, progress_bar
from kenotron.config.errors import CheckpointError, byte_size, counted
from kenotron.config.remote_data import is_remote

Entry: TypeAlias = CheckpointFolder | RemoteCheckpoint
Check: TypeAlias = Callable[..., list[str]]

app = typer.Typer(no_args_is_help=True, help="List, verify, prune and upload checkpoints.")

Folder = Annotated[str, typer.Argument(help="The folder of checkpoints, local or s3://….")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(folder: Folder, as_json: AsJson = False) -> None:
    """List the checkpoints of a folder, the newest last. `verify` checks their contents."""
    entries = _entries(folder)
    if as_json:
        print(json.dumps([_summary(entry) for entry in entries], indent=2))
        return
    rows = []
    for entry in entries:
        rows.append([str(entry.step), _date(entry.manifest), _size(entry.manifest), entry.problem or "complete"])
    print_table(["step", "saved", "size", "state"], rows)


@app.command()
def show(
    path: Annotated[str, typer.Argument(help="A checkpoint's folder, or the folder of checkpoints for the newest.")],
) -> None:
    """Print the contents of a checkpoint: step, counters, files, and the shape, dtype and size of each tensor."""
    local = resolve(fetch_checkpoint(path))
    manifest = read_manifest(local)
    folders = [folder for folder in ("model", "optimizer", "hooks") if manifest.below(folder)]
    indexes = {folder: read_index(local / folder, manifest.files) for folder in folders}
    print(f"checkpoint {manifest.step} in {local}, saved {_date(manifest)}, {_size(manifest)}")
    print(f"config: {local / 'config.yaml'}")
    print(f"state: {json.dumps(manifest.state)}")
    for folder, index in indexes.items():
        rows = [
            [name, str(list(entry.shape)), DTYPES[entry.dtype][0], byte_size(entry.bytes), str(len(entry.chunks))]
            for name, entry in index.items()
        ]
        total = sum(entry.bytes for entry in index.values())
        print(f"\n{folder}: {len(rows)} tensors, {byte_size(total)}")
        print_table(["tensor", "shape", "dtype", "size", "chunks"], rows)


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="A step's folder, or the folder above it for all its steps.")],
    as_json: AsJson = False,
) -> None:
    """Compare every file with its checksum. Exit code 1 if anything is damaged or missing."""
    checks = _remote_checks(path) if is_remote(path) else _local_checks(Path(path))
    problems = {step: _verify_one(step, check, show_progress=not as_json) for step, check in checks.items()}
    if as_json:
        print(json.dumps(problems, indent=2))
    else:
        for step, lines in problems.items():
            print("\n".join(lines) if lines else f"{step} is intact")
    if any(problems.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    folder: Folder,
    keep_last: Annotated[int, typer.Option(help="Number of newest checkpoints to keep.", min=1)],
    keep_every: Annotated[
        int | None, typer.Option(help="Also keep every step that is a multiple of this.", min=1)
    ] = None,
    keep_best: Annotated[bool, typer.Option("--keep-best", help="Also keep the one with the lowest val_loss.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove old checkpoints. The newest one and damaged ones are never removed.

    Checksums of the newest ones to keep are verified first; in a store, only sizes.
    """
    _entries(folder)  # raises if there is nothing
    keep = Keep(keep_last, keep_every, best=keep_best)
    doomed: Sequence[Entry]
    if is_remote(folder):
        from kenotron.checkpoint.remote import RemoteCheckpoints

        remote = RemoteCheckpoints(folder)
        doomed = superseded(remote.all(), keep)
        if not dry_run:
            for step in [entry.step for entry in doomed]:
                remote.remove(step, remote.manifest(step)[0])
    else:
        doomed = to_prune(folder, keep)
        if doomed:
            doomed = to_prune(folder, keep, _damaged_among_newest(folder, keep_last))
        if not dry_run:
            for path in [Path(entry.path) for entry in doomed]:
                discard(path)
    freed = sum(entry.manifest.bytes for entry in doomed if entry.manifest)
    for entry in doomed:
        print(f"{'would remove' if dry_run else 'removed'} {entry.path}")
    print(f"{counted(len(doomed), 'checkpoint')}, {byte_size(freed)}")


@app.command()
def upload(
    folder: Annotated[Path, typer.Argument(help="The local folder of checkpoints.")],
    url: Annotated[str, typer.Argument(help="Where to upload them: s3://bucket/folder, or another store's URL.")],
) -> None:
    """Upload the complete checkpoints of a folder that a store does not have yet, as a run does."""
    if not is_remote(url):
        raise CheckpointError(f"URL: expected a store such as s3://bucket/run, found {url}")
    damaged = [entry for entry in _entries(str(folder)) if entry.problem]
    from kenotron.checkpoint.remote import check_same_run
    from kenotron.checkpoint.upload import Uploader

    uploader = Uploader(folder, url, report=print)
    check_same_run(uploader.remote, folder, run_id(folder))
    uploader.upload_pending()
    for entry in damaged:
        print(f"error: checkpoint {entry.step} was not uploaded: {entry.problem}", file=sys.stderr)
    if uploader.problems or damaged:
        raise typer.Exit(1)
    print(f"{url} has every complete checkpoint of {folder}")


def _damaged_among_newest(folder: str, keep_last: int) -> list[int]:
    """Return the steps of damaged checkpoints that are newer than the oldest of `keep_last` intact ones."""
    damaged, intact = [], 0
    for entry in reversed([entry for entry in list_checkpoints(folder) if entry.manifest]):
        problems = verify_entry(entry)
        if problems:
            damaged.append(entry.step)
            print(f"warning: {problems[0]}; checkpoint {entry.step} is kept and not counted", file=sys.stderr)
        intact += not problems
        if intact == keep_last:
            break
    return damaged


def _entries(location: str) -> Sequence[Entry]:
    """Return the checkpoints of a folder or URL, also damaged ones. Raises CheckpointError if there are none."""
    if is_remote(location):
        from kenotron.checkpoint.remote import RemoteCheckpoints

        if remote := RemoteCheckpoints(location).all():
            return remote
        raise CheckpointError(f"{location} holds no checkpoints")
    entries = list_checkpoints(location)
    if not entries:
        one = resolve(location)  # raises, and says what is there, unless it is a checkpoint
        raise CheckpointError(f"{one} is a checkpoint; expected a folder of checkpoints")
    return entries


def _local_checks(path: Path) -> dict[str, Check]:
    unfinished = path.name.isdigit() and path.is_dir() and not list_checkpoints(path)
    single = unfinished or (path / MANIFEST).exists()
    folders = [path] if single else [entry.path for entry in _entries(str(path))]
    return {str(folder): partial(verify_checkpoint, folder) for folder in folders}


def _remote_checks(url: str) -> dict[str, Check]:
    from kenotron.checkpoint.remote import RemoteCheckpoints, find

    if url.rstrip("/").rpartition("/")[2].isdigit():
        checkpoints, step = find(url)
        return {url: partial(checkpoints.verify, step)}
    remote = RemoteCheckpoints(url)
    return {str(entry.path): partial(remote.verify, entry.step) for entry in _entries(url)}


def _verify_one(path: str, check: Check, show_progress: bool) -> list[str]:
    """Return the problems that `check` finds, with a progress bar on a terminal."""
    if not show_progress:
        return check()
    with progress_bar(f"verifying {path}") as progress:
        return check(progress=progress)


def verify_entry(entry: CheckpointFolder) -> list[str]:
    """Return the problems of a checkpoint, with a progress bar on a terminal."""
    return _verify_one(str(entry.path), partial(verify_checkpoint, entry.path), show_progress=True)


def _summary(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "path": str(entry.path),
        "saved_at": manifest.saved_at if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "problem": entry.problem,
    }


def _date(manifest: Manifest | None) -> str:
    return datetime.fromtimestamp(manifest.saved_at).isoformat(" ", "seconds") if manifest else "?"


def _size(manifest: Manifest | None) -> str:
    return byte_size(manifest.bytes) if manifest else "?"
