"""Finding checkpoints in a folder and verifying them.

    checkpoints/
    ├── latest.txt      "20", the newest step; written last
    ├── 10/             a checkpoint
    ├── 20/
    └── 30.tmp-3f9c/    what a killed process left; never looked at

`resolve` is for a user's argument, `newest_complete` for a run that resumes: the one trusts `latest.txt` and
says what is wrong, the other believes only manifests and checksums.
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
from kenotron.parallel.ranks import gather, raise_on_any_rank, rank_and_size, ranks_with, run_on_rank0
from kenotron.storage.files import sync_folder

logger = logging.getLogger("kenotron")
LATEST = "latest.txt"
NANOTRON_METADATA = "checkpoint_metadata.json"  # in every checkpoint of nanotron
Report = Callable[[str], None]
Progress = Callable[[int, int], None]
Check = Callable[[str, FileRecord], str | None]


def quiet(line: str) -> None:
    """A `Report` for callers that do not want one."""


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
    """In the order of saving; before all, by step, those without a sound manifest."""
    return sorted(entries, key=lambda entry: (entry.manifest.saved_at if entry.manifest else 0.0, entry.step))


def list_checkpoints(root: Path | str) -> list[CheckpointFolder]:
    """The step folders in `root`, `oldest_first`.

    Looks at manifests and file sizes; checksums are `verify`'s.
    """
    root = Path(root)
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if re.fullmatch(r"\d+", path.name) and path.is_dir()]
    return oldest_first(look(path, int(path.name)) for path in folders)


def look(path: Path, step: int) -> CheckpointFolder:
    """What is in the folder `path`, which should hold `step`."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return CheckpointFolder(step, path, None, _looks_like(path) or str(error))
    sizes = (_wrong_size(path / name, record) for name, record in manifest.files.items())
    return listed(step, path, manifest, next(filter(None, sizes), None))


def listed(step: int, path: Place, manifest: Manifest, problem: str | None) -> Listed[Place]:
    """What is at `path`, by its manifest and the first `problem` with its files."""
    if manifest.step != step:
        problem = f"{path} holds step {manifest.step}: it was renamed"
    return Listed(step, path, None if problem else manifest, problem)


def publish(temporary: Path, final: Path) -> None:
    """Give a complete, synced checkpoint its name, then say so in `latest.txt`.

    Whatever had the name before is moved aside, and back if the rename fails. If it was a checkpoint, it is then
    deleted; anything else stays, under a name that is logged. A kill between the two renames leaves the complete
    `temporary`, which `tidy` renames.
    """
    aside = None
    if final.exists():
        ours = (final / MANIFEST).exists()
        token = temporary.name.rpartition("-")[2]
        aside = final.with_name(f".trash-{final.name}-{token}" if ours else f"{final.name}.replaced-{token}")
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if aside:
            os.rename(aside, final)
        raise
    sync_folder(final.parent)
    replace_text(final.parent / LATEST, final.name)
    if aside and ours:
        shutil.rmtree(aside, ignore_errors=True)
    elif aside:
        logger.warning("%s was not a checkpoint of Kénotron; it is now %s", final, aside.name)


def verify(path: Path | str, progress: Progress | None = None) -> list[str]:
    """Read every byte of a checkpoint and return what is wrong, one line each; nothing if it is intact.

    `progress(done, total)` is called with bytes. This process reads all of it; a run's ranks share the work
    in `newest_complete` and `load`.
    """
    path = Path(path)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    return check_files(path, manifest.files, progress)


def check_files(path: Path, files: dict[str, FileRecord], progress: Progress | None = None) -> list[str]:
    """Compare files with their records; one line for each that is missing, cut, or changed."""

    def check(name: str, record: FileRecord) -> str | None:
        return _wrong_size(path / name, record) or _wrong_content(path / name, record)

    return problems_of(files, check, progress)


def problems_of(files: dict[str, FileRecord], check: Check, progress: Progress | None) -> list[str]:
    """What `check(name, record)` says of each of `files`, where it is not None; `progress` is told the bytes."""
    problems, done, total = list[str](), 0, sum(record.bytes for record in files.values())
    for name, record in files.items():
        if problem := check(name, record):
            problems.append(problem)
        done += record.bytes
        if progress:
            progress(done, total)
    return problems


def check_together(path: Path, files: dict[str, FileRecord]) -> list[str]:
    """As `check_files`, the ranks with the same `path` sharing its files; every rank gets all the problems."""
    mine = share_of(files, ranks_with(str(path)))
    found = gather(raise_on_any_rank(lambda: check_files(path, mine)))
    return [problem for problems in found for problem in problems]


def share_of(files: dict[str, FileRecord], ranks: list[int]) -> dict[str, FileRecord]:
    """This rank's share of `files`, which `ranks` read together, each about as many bytes."""
    shares: list[dict[str, FileRecord]] = [{} for _ in ranks]
    loads = [0] * len(ranks)
    for name, record in sorted(files.items(), key=lambda item: (-item[1].bytes, item[0])):
        lightest = loads.index(min(loads))
        shares[lightest][name] = record
        loads[lightest] += record.bytes
    return shares[ranks.index(rank_and_size()[0])]


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
    """The checkpoint that was saved last and is intact to the last byte, or None.

    Every damaged one that would have come before it is reported in one line, by rank 0. In a run of several ranks
    all call it, each reads its share, and all return the same. Ranks must see one file system.
    """
    for entry in reversed(_in_order(run_on_rank0(lambda: list_checkpoints(root)))):
        problems = check_together(entry.path, entry.manifest.files) if entry.manifest else [str(entry.problem)]
        if not problems:
            return entry.path
        if rank_and_size()[0] == 0:
            report(f"skipping checkpoint {entry.step}: {first_of(problems)}")
    return None


def _in_order(entries: list[CheckpointFolder]) -> list[CheckpointFolder]:
    """By time of saving; a folder without a readable manifest is placed by its step."""
    complete = [entry for entry in entries if entry.manifest]
    for entry in sorted((entry for entry in entries if not entry.manifest), key=lambda entry: entry.step):
        before = [place for place, other in enumerate(complete) if other.step < entry.step]
        complete.insert(before[-1] + 1 if before else 0, entry)
    return complete


def resolve(path: Path | str) -> Path:
    """The checkpoint that a user means: a step's folder itself, or in a folder the one that `latest.txt` names.

    Without that file, the one saved last.

    >>> resolve("checkpoints/10")        # doctest: +SKIP
    PosixPath('checkpoints/10')
    >>> resolve("checkpoints")           # doctest: +SKIP
    PosixPath('checkpoints/20')

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
        if steps:  # the file was lost: the last that was saved
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
