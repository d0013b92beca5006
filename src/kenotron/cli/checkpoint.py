"""`kenotron checkpoint`: list, verify, prune and average checkpoints.

    kenotron checkpoint list checkpoints
    kenotron checkpoint show checkpoints/20
    kenotron checkpoint verify checkpoints             # every byte; exit code 1 if one is damaged
    kenotron checkpoint prune checkpoints --keep-last 2 --keep-every 1000 --dry-run
    kenotron checkpoint average checkpoints/10 checkpoints/20 --output mean

Each but the last takes `--json`. A table on a terminal, plain columns elsewhere. Only `average` imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from kenotron.checkpoint.folders import Found, list_checkpoints, resolve
from kenotron.checkpoint.index import DTYPES, Index, read_index
from kenotron.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from kenotron.checkpoint.retention import prune as prune_checkpoints
from kenotron.checkpoint.retention import to_prune
from kenotron.config.errors import CheckpointError, InputError, counted, nearest

app = typer.Typer(no_args_is_help=True, help="List, verify, prune and average checkpoints.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(folder: Annotated[Path, typer.Argument(help="The folder of checkpoints.")], as_json: AsJson = False) -> None:
    """List the checkpoints of a folder, the newest last. `verify` checks their contents."""
    found = _all_in(folder)
    if as_json:
        _print_json([_summary(entry) for entry in found])
        return
    rows = [
        [str(entry.step), _date(entry.manifest), _size(entry.manifest), entry.problem or "complete"] for entry in found
    ]
    _print_table(["step", "saved", "size", "state"], rows)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or the folder of checkpoints for the newest.")],
    as_json: AsJson = False,
) -> None:
    """Print the contents of a checkpoint: step, counters, files, and the shape, dtype and size of each tensor."""
    path = resolve(path)
    manifest = read_manifest(path)
    folders = [folder for folder in ("model", "optimizer") if manifest.below(folder)]
    indexes = {folder: read_index(path / folder, manifest.files) for folder in folders}
    if as_json:
        _print_json(_everything(path, manifest, indexes))
        return
    print(f"checkpoint {manifest.step} in {path}, saved {_date(manifest)}, {_size(manifest)}")
    print(f"config: {path / 'config.yaml'}")
    print(f"state: {json.dumps(manifest.state)}")
    for folder, index in indexes.items():
        rows = [
            [name, str(list(entry.shape)), DTYPES[entry.dtype][0], _human(entry.bytes), str(len(entry.chunks))]
            for name, entry in index.tensors.items()
        ]
        total = sum(entry.bytes for entry in index.tensors.values())
        print(f"\n{folder}: {len(rows)} tensors, {_human(total)}; {len(index.values)} values")
        _print_table(["tensor", "shape", "dtype", "size", "chunks"], rows)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(help="A step's folder, or the folder above it for all its steps.")],
    as_json: AsJson = False,
) -> None:
    """Compare every file with its checksum. Exit code 1 if anything is damaged or missing."""
    paths = [path] if (path / MANIFEST).exists() else [entry.path for entry in _all_in(path)]
    problems = {str(step): _verify_one(step, show_progress=not as_json) for step in paths}
    if as_json:
        _print_json(problems)
    else:
        for step, lines in problems.items():
            print("\n".join(lines) if lines else f"{step} is intact")
    if any(problems.values()):
        raise typer.Exit(1)


@app.command()
def prune(
    folder: Annotated[Path, typer.Argument(help="The folder of checkpoints.")],
    keep_last: Annotated[int, typer.Option(help="Number of newest checkpoints to keep.", min=1)],
    keep_every: Annotated[int | None, typer.Option(help="Also keep every step that this divides.", min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints. The newest one and damaged ones are never removed."""
    _all_in(folder)
    doomed = to_prune(folder, keep_last, keep_every)
    freed = sum(entry.manifest.bytes for entry in doomed if entry.manifest)
    if not dry_run:
        prune_checkpoints(folder, keep_last, keep_every)
    if as_json:
        _print_json({"removed": [str(entry.path) for entry in doomed], "bytes": freed, "dry_run": dry_run})
        return
    for entry in doomed:
        print(f"{'would remove' if dry_run else 'removed'} {entry.path}")
    print(f"{counted(len(doomed), 'checkpoint')}, {_human(freed)}")


@app.command()
def average(
    paths: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT...", help="Two checkpoints of a model, or more.")],
    output: Annotated[Path, typer.Option(help="New folder of checkpoints; the average keeps the highest step.")],
    weights: Annotated[
        str | None, typer.Option(help="One for each checkpoint, such as 3,1; they are divided by their sum.")
    ] = None,
) -> None:
    """Average the weights of checkpoints, or merge them: a checkpoint without optimizer state."""
    from kenotron.checkpoint.averaging import average

    try:
        numbers = None if weights is None else [float(weight) for weight in weights.split(",")]
    except ValueError:
        raise InputError(f"--weights: expected numbers such as 3,1, found {weights!r}") from None
    saved = average(paths, output, numbers)
    print(f"Wrote {saved.path}: {_human(saved.bytes)} in {saved.seconds:.1f} s")
    print(f"Next: kenotron generate {saved.path}")


def _all_in(folder: Path) -> list[Found]:
    """The folder's checkpoints, sound or not; an error if there is none at all."""
    found = list_checkpoints(folder)
    if not folder.is_dir():
        if folder.is_file():
            raise CheckpointError(f"{folder} is a file; expected a folder of checkpoints")
        siblings = [path.name for path in folder.absolute().parent.glob("*")]
        raise CheckpointError(f"{folder} is not a folder{nearest(folder.name, siblings)}")
    if not found:
        raise CheckpointError(f"{folder} holds no checkpoints")
    return found


def _verify_one(path: Path, show_progress: bool) -> list[str]:
    from kenotron.checkpoint.folders import verify as verify_checkpoint

    if not (show_progress and sys.stderr.isatty()):
        return verify_checkpoint(path)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(f"verifying {path}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        return verify_checkpoint(path, lambda done, total: bar.update(task, completed=done, total=total))


def _summary(entry: Found) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "path": str(entry.path),
        "saved_at": manifest.saved_at if manifest else None,
        "bytes": manifest.bytes if manifest else None,
        "problem": entry.problem,
    }


def _everything(path: Path, manifest: Manifest, indexes: dict[str, Index]) -> dict[str, Any]:
    tensors = {
        folder: {
            name: {"shape": list(entry.shape), "dtype": DTYPES[entry.dtype][0], "bytes": entry.bytes}
            for name, entry in index.tensors.items()
        }
        for folder, index in indexes.items()
    }
    return {
        "step": manifest.step,
        "path": str(path),
        "saved_at": manifest.saved_at,
        "bytes": manifest.bytes,
        "config": str(path / "config.yaml"),
        "state": manifest.state,
        "files": {name: record._asdict() for name, record in manifest.files.items()},
        "tensors": tensors,
        "values": {folder: index.values for folder, index in indexes.items()},
    }


def _date(manifest: Manifest | None) -> str:
    return datetime.fromtimestamp(manifest.saved_at).isoformat(" ", "seconds") if manifest else "?"


def _size(manifest: Manifest | None) -> str:
    return _human(manifest.bytes) if manifest else "?"


def _human(count: float) -> str:
    """Bytes in decimal units: 1542000 → `1.54 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table where someone looks, columns with a fixed number of spaces where a program reads."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for line in (header, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
