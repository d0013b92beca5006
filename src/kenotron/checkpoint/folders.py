"""Find checkpoints in a folder and verify them.

    checkpoints/
    ├── latest.txt      "20", the newest step; written last
    ├── 10/             a checkpoint
    ├── 20/
    └── 30.tmp-3f9c/    left by a killed process; ignored

`resolve` is for a user's argument: it trusts `latest.txt` and reports what is wrong. `newest_complete` is for a run
that resumes: it trusts only manifests and checksums.
"""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from kenotron.checkpoint.durable import FileRecord, hash_file, replace_text
from kenotron.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from kenotron.config.errors import CheckpointError, first_of, nearest
from kenotron.parallel.ranks import balance, gather, raise_on_any_rank, rank_and_size, ranks_with, run_on_rank0
from kenotron.storage.files import sync_folder

logger = logging.getLogger("kenotron")
LATEST = "latest.txt"
NANOTRON_METADATA = "checkpoint_metadata.json"  # in every checkpoint of nanotron
Report = Callable[[str], None]
Progress = Callable[[int, int], None]
Check = Callable[[str, FileRecord], str | None]


def quiet(line: str) -> None:
    """Ignore the line: a `Report` for callers that need none."""


Place = TypeVar("Place", Path, str)


@dataclass(frozen=True)
class Listed(Generic[Place]):
    """A step at `path`. `manifest` is None when `problem` says why it cannot be a complete checkpoint."""

    step: int
    path: Place
    manifest: Manifest | None
    problem: str | None


CheckpointFolder: TypeAlias = Listed[Path]
RemoteCheckpoint: TypeAlias = Listed[str]  # in a store, by its URL


def oldest_first(entries: Iterable[Listed[Place]]) -> list[Listed[Place]]:
    """Return `entries` in the order of saving, after those without a sound manifest, in the order of steps."""
    return sorted(entries, key=lambda entry: (entry.manifest.saved_at if entry.manifest else 0.0, entry.step))


def list_checkpoints(root: Path | str) -> list[CheckpointFolder]:
    """Return the step folders in `root`, `oldest_first`.

    Checks manifests and file sizes; `verify` checks checksums.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if re.fullmatch(r"\d+", path.name) and path.is_dir()]
    return oldest_first(look(path, int(path.name)) for path in folders)


def look(path: Path, step: int) -> CheckpointFolder:
    """Return the entry of the folder `path`, which should hold `step`, with the problem if there is one."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return CheckpointFolder(step, path, None, _looks_like(path) or str(error))
    sizes = (_wrong_size(path / name, record) for name, record in manifest.files.items())
    return listed(step, path, manifest, next(filter(None, sizes), None))


def listed(step: int, path: Place, manifest: Manifest, problem: str | None) -> Listed[Place]:
    """Return the entry of `path`, from its manifest and the first `problem` with its files."""
    if manifest.step != step:
        problem = f"{path} holds step {manifest.step}: it was renamed"
    return Listed(step, path, None if problem else manifest, problem)


def publish(temporary: Path, final: Path) -> None:
    """Rename a complete, synced checkpoint to its final name, then write the step to `latest.txt`.

    A folder that had the name before is moved aside, and back if the rename fails. If it was a checkpoint, it is then
    deleted; anything else is kept under a name that is logged. A kill between the two renames leaves the complete
    `temporary`, which `tidy` renames.
    """
    aside = None
    if final.exists():
        is_checkpoint = (final / MANIFEST).exists()
        token = temporary.name.rpartition("-")[2]
        aside = final.with_name(f".trash-{final.name}-{token}" if is_checkpoint else f"{final.name}.replaced-{token}")
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if aside:
            os.rename(aside, final)
        raise
    sync_folder(final.parent)
    replace_text(final.parent / LATEST, final.name)
    if aside and is_checkpoint:
        shutil.rmtree(aside, ignore_errors=True)
    elif aside:
        logger.warning("%s was not a checkpoint of Kénotron; it is now %s", final, aside.name)


def verify(path: Path | str, progress: Progress | None = None) -> list[str]:
    """Read every byte of a checkpoint and return one line per problem, none if it is intact.

    `progress(done, total)` is called with bytes. This process reads everything; a run's ranks share the work in
    `newest_complete` and `load`.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    return check_files(path, manifest.files, progress)


def check_files(path: Path, files: dict[str, FileRecord], progress: Progress | None = None) -> list[str]:
    """Compare files with their records; return one line for each that is missing, truncated or changed."""

    def check(name: str, record: FileRecord) -> str | None:
        return _wrong_size(path / name, record) or _wrong_content(path / name, record)

    return problems_of(files, check, progress)


def problems_of(files: dict[str, FileRecord], check: Check, progress: Progress | None) -> list[str]:
    """Return the results of `check(name, record)` that are not None; `progress` is called with bytes."""
    problems, done, total = list[str](), 0, sum(record.bytes for record in files.values())
    for name, record in files.items():
        if problem := check(name, record):
            problems.append(problem)
        done += record.bytes
        if progress:
            progress(done, total)
    return problems


def check_together(path: Path, files: dict[str, FileRecord]) -> list[str]:
    """As `check_files`, but the ranks with the same `path` share its files; every rank gets all problems."""
    mine = share_of(files, ranks_with(str(path)))
    found = gather(raise_on_any_rank(lambda: check_files(path, mine)))
    return [problem for problems in found for problem in problems]


def share_of(files: dict[str, FileRecord], ranks: list[int]) -> dict[str, FileRecord]:
    """Return this rank's share of `files`, which `ranks` read together, with about equal numbers of bytes."""
    names = sorted(files)
    owners = balance([files[name].bytes for name in names], len(ranks))
    mine = ranks.index(rank_and_size()[0])
    return {name: files[name] for name, owner in zip(names, owners) if owner == mine}


def _wrong_size(path: Path, record: FileRecord) -> str | None:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} is missing" if error.errno == errno.ENOENT else f"{path} cannot be read: {error.strerror}"
    if size != record.bytes:
        return f"{path} is damaged: it has {size} bytes, and {record.bytes} were written"
    return None


def _wrong_content(path: Path, record: FileRecord) -> str | None:
    try:
        found = hash_file(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found != record:
        return f"{path} is damaged: its checksum is {found.xxh3}, and was {record.xxh3} when written"
    return None


def newest_complete(root: Path | str, report: Report = quiet) -> Path | None:
    """Return the checkpoint that was saved last among those that are intact to the last byte, or None.

    Rank 0 reports every newer but damaged one in one line. In a run of several ranks all call it, each reads its share,
    and all return the same. Ranks must share a file system.
    """
    for entry in reversed(_in_order(run_on_rank0(lambda: list_checkpoints(root)))):
        problems = check_together(entry.path, entry.manifest.files) if entry.manifest else [str(entry.problem)]
        if not problems:
            return entry.path
        if rank_and_size()[0] == 0:
            report(f"skipping checkpoint {entry.step}: {first_of(problems)}")
    return None


def _in_order(entries: list[CheckpointFolder]) -> list[CheckpointFolder]:
    """Sort by time of saving; a folder without a readable manifest is sorted by its step."""
    complete = [entry for entry in entries if entry.manifest]
    for entry in sorted((entry for entry in entries if not entry.manifest), key=lambda entry: entry.step):
        before = [place for place, other in enumerate(complete) if other.step < entry.step]
        complete.insert(before[-1] + 1 if before else 0, entry)
    return complete


def resolve(path: Path | str) -> Path:
    """Return the checkpoint that a user means: a step's folder, or the step that `latest.txt` of a folder names.

    Without that file, return the one saved last.

    Raises:
        CheckpointError: there is none; the message says what `path` holds.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: {_nearby(path)}")
    if path.is_file():
        raise CheckpointError(f"{path} is a file; expected a checkpoint, or a folder of checkpoints")
    if (path / MANIFEST).exists():
        read_manifest(path)
        return path
    steps = [str(entry.step) for entry in list_checkpoints(path) if entry.manifest]
    have = f"it has {', '.join(steps)}" if steps else "it has no complete checkpoint"
    if not (path / LATEST).exists():
        if steps:  # the file was lost: take the one saved last
            return path / steps[-1]
        raise CheckpointError(f"{path} is not a checkpoint: {_looks_like(path) or have}")
    step = (path / LATEST).read_text(errors="replace").strip()
    if step not in steps:
        reason = next((entry.problem for entry in list_checkpoints(path) if str(entry.step) == step), None)
        raise CheckpointError(f"{path / LATEST} names {step!r}, {reason or 'which is missing'}; {have}")
    return path / step


def _nearby(path: Path) -> str:
    parent = next(parent for parent in path.parents if parent.exists() or parent == parent.parent)
    missing = path.relative_to(parent).parts[0]
    complete = [str(entry.step) for entry in list_checkpoints(parent) if entry.manifest]
    if path.name.isdigit() and complete:
        return f"{parent} has {', '.join(complete)}"
    where = "the current folder" if parent == Path() else parent
    return f"{where} has no {missing!r}{nearest(missing, [entry.name for entry in parent.iterdir()])}"


def _looks_like(path: Path) -> str | None:
    if ".tmp-" in path.name:
        return "it is the unfinished save of a killed process"
    if (path / NANOTRON_METADATA).exists():
        return "it is a nanotron checkpoint; `kenotron convert from-nanotron` converts it"
    if (path / "config.json").exists():
        return "it is a Hugging Face model; `kenotron convert from-hf` converts it to a checkpoint"
    runs = sorted(str(latest.parent) for latest in path.glob(f"*/{LATEST}"))
    return f"it has folders of checkpoints: {', '.join(runs[:5])}" if runs else None
