"""Find, verify, fetch and remove checkpoints in a bucket or another store.

    <url>/.run                           the id of the run, as in its folder
    <url>/latest.txt                     the newest step, written after its manifest
    <url>/30/manifest.json               written when all other objects are there in full size: without it
                                         there is no checkpoint
    <url>/30/manifest.json.incomplete    the manifest during an upload or removal; deleted last
    <url>/30/model/…, optimizer/…, …

A store cannot rename, so the order in which objects are written and removed replaces the rename on a disk: a process
may be killed between any two of them, and readers find only complete checkpoints. Leftovers are recognized by their
`manifest.json.incomplete`; the next upload completes or removes them (`upload.py`).
"""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import xxhash

from kenotron.checkpoint import durable, folders
from kenotron.checkpoint.durable import RUN, FileRecord, HashedFile, make_folder, run_id
from kenotron.checkpoint.folders import LATEST, Progress, RemoteCheckpoint, Report, list_checkpoints, quiet
from kenotron.checkpoint.leftovers import tidy
from kenotron.checkpoint.manifest import MANIFEST, Manifest, parse
from kenotron.config import Config
from kenotron.config.errors import CheckpointError, InputError
from kenotron.config.remote_data import RemoteData
from kenotron.storage.files import cache_root, sync_folder, temporary_beside
from kenotron.storage.stores import PARTS_AT_ONCE, Store

INCOMPLETE = f"{MANIFEST}.incomplete"

FETCH_WAIT_S = 24 * 3600.0
"""Seconds to wait for another process that fetches into the same folder."""


class Damaged(CheckpointError):
    """A checkpoint in a store that differs from what was uploaded; an earlier one may be intact."""


class RemoteCheckpoints:
    """The checkpoints below `url`. Every method raises InputError if the store cannot be reached."""

    def __init__(self, url: str, settings: RemoteData | None = None, parts_at_once: int = PARTS_AT_ONCE) -> None:
        self.store = Store(url, settings, parts_at_once)
        self.url = self.store.url

    def objects(self) -> dict[int, dict[str, int]]:
        """Return step → object name → bytes for every object in a step's folder, checkpoint or not."""
        found: dict[int, dict[str, int]] = {}
        for name, size in self.store.sizes().items():
            step, _, rest = name.partition("/")
            if step.isdigit() and rest:
                found.setdefault(int(step), {})[rest] = size
        return found

    def holds_any(self) -> bool:
        """Return whether the store has a checkpoint, sound or not."""
        return any(MANIFEST in objects for objects in self.objects().values())

    def all(self) -> list[RemoteCheckpoint]:
        """Return the steps with a manifest, `oldest_first`; a step that does not match its manifest is not sound."""
        found = self.objects().items()
        return folders.oldest_first(self.look(step, objects) for step, objects in found if MANIFEST in objects)

    def look(self, step: int, objects: dict[str, int]) -> RemoteCheckpoint:
        """Return the entry of a step whose folder has these objects, including a manifest."""
        path = self.store.at(str(step))
        try:
            _, manifest = self.manifest(step)
        except CheckpointError as error:
            return RemoteCheckpoint(step, path, None, str(error))
        return folders.listed(step, path, manifest, wrong_sizes(path, manifest, objects))

    def manifest(self, step: int) -> tuple[bytes, Manifest]:
        """Return the manifest of `step`, as bytes and parsed. Raises CheckpointError if it is missing or damaged."""
        try:
            data = self.store.read(f"{step}/{MANIFEST}")
        except FileNotFoundError:
            raise CheckpointError(f"{self.store.at(str(step))} is not a complete checkpoint: no {MANIFEST}") from None
        return data, parse(data, self.store.at(f"{step}/{MANIFEST}"))

    def verify(self, step: int, progress: Progress | None = None) -> list[str]:
        """Read every byte of a checkpoint and return one line per problem."""
        try:
            _, manifest = self.manifest(step)
        except CheckpointError as error:
            return [str(error)]
        check = partial(self._receive, step, write=lambda piece: None)
        return folders.problems_of(manifest.files, check, progress)

    def _receive(self, step: int, name: str, record: FileRecord, write: Callable[[bytes], None]) -> str | None:
        """Read a whole file of a checkpoint, pass its bytes to `write`, and return the problem with it, or None."""
        place, digest = self.store.at(f"{step}/{name}"), xxhash.xxh3_64()
        try:
            for piece in self.store.stream(f"{step}/{name}"):
                digest.update(piece)
                write(piece)
        except FileNotFoundError:
            return f"{place} is missing"
        if digest.hexdigest() != record.xxh3:
            return f"{place} is damaged: its checksum is {digest.hexdigest()}, and was {record.xxh3} when written"
        return None

    def fetch(
        self, step: int, root: Path, selects: Callable[[str], bool] = lambda name: True, keep: bool = False
    ) -> Path:
        """Fetch checkpoint `step` to ``<root>/<step>``, atomically, and check it while it arrives.

        `selects` picks files by name. An existing folder is replaced, except with `keep` if it has the same manifest.

        Raises:
            Damaged: an object is missing, or is not what was uploaded.
            CheckpointError: the disk is full, or may not be written.
        """
        final = root / str(step)
        make_folder(root)
        with durable.locked(root, FETCH_WAIT_S):
            try:
                data, manifest = self.manifest(step)
            except CheckpointError as error:
                raise Damaged(str(error)) from None
            files = {name: record for name, record in manifest.files.items() if selects(name)}
            if keep and _holds(final, data, {name: record.bytes for name, record in files.items()}):
                return final
            temporary = temporary_beside(final)
            try:
                make_folder(temporary)
                for name, record in files.items():
                    make_folder((temporary / name).parent)
                    with HashedFile(temporary / name) as file:
                        problem = self._receive(step, name, record, file.write)
                    if problem is not None:
                        raise Damaged(problem)
                durable.write_file(temporary / MANIFEST, data)
                for folder in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
                    sync_folder(folder)
                folders.publish(temporary, final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return final

    def remove(self, step: int, manifest: bytes | None) -> None:
        """Remove a step, its manifest first, which `.incomplete` keeps; `manifest` None: it is marked so already."""
        if manifest is not None:
            self.store.put(f"{step}/{INCOMPLETE}", manifest)
        self.store.delete(f"{step}/{MANIFEST}")
        for name in self.store.sizes(str(step)):
            if name != f"{step}/{INCOMPLETE}":
                self.store.delete(name)
        self.store.delete(f"{step}/{INCOMPLETE}")

    def newest_named(self) -> int:
        """Return the step in `latest.txt` if it is complete, else the one saved last. Raises CheckpointError."""
        found = self.all()
        steps = [entry.step for entry in found if entry.manifest]
        if not steps:
            problems = "".join(f"; {entry.problem}" for entry in found)
            raise CheckpointError(f"no checkpoint at {self.url}: it has no complete checkpoint{problems}")
        try:
            latest = self.store.read(LATEST).decode(errors="replace").strip()
        except FileNotFoundError:
            latest = ""
        return int(latest) if latest.isdigit() and int(latest) in steps else steps[-1]


def wrong_sizes(path: str, manifest: Manifest, objects: dict[str, int]) -> str | None:
    """Return the problem with the first file of the manifest that is missing or has another size, or None."""
    for name, record in manifest.files.items():
        if name not in objects:
            return f"{path}/{name} is missing"
        if objects[name] != record.bytes:
            return f"{path}/{name} is damaged: it has {objects[name]} bytes, and {record.bytes} were written"
    return None


def _holds(folder: Path, manifest: bytes, sizes: dict[str, int]) -> bool:
    """Return whether `folder` has this manifest and files of these sizes."""
    try:
        same = (folder / MANIFEST).read_bytes() == manifest
        return same and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except OSError:
        return False


# ---- for users' arguments ------------------------------------------------------------------------------------


def find(url: str, settings: RemoteData | None = None) -> tuple[RemoteCheckpoints, int]:
    """Return the checkpoint that a user means by `url`: a step's folder, or the newest step of a folder.

    Raises:
        CheckpointError: there is none; the message says what there is.
    """
    url = url.rstrip("/")
    if url.startswith(("hf://", "http://", "https://")):
        raise CheckpointError(f"{url}: expected a store that checkpoints are uploaded to, such as s3://bucket/run")
    above, _, name = url.rpartition("/")
    if name.isdigit() and "://" in above:
        checkpoints = RemoteCheckpoints(above, settings)
        if checkpoints.store.version(f"{name}/{MANIFEST}") is not None:
            return checkpoints, int(name)
        steps = [str(entry.step) for entry in checkpoints.all() if entry.manifest]
        raise CheckpointError(f"no checkpoint at {url}: {above} has {', '.join(steps) or 'no complete checkpoint'}")
    checkpoints = RemoteCheckpoints(url, settings)
    return checkpoints, checkpoints.newest_named()


def local_copy(url: str) -> Path:
    """Return a local copy, in the cache, of the checkpoint at `url` without its optimizer's tensors.

    It is in ``$KENOTRON_CACHE/checkpoints/s3/bucket/…`` and is fetched again if the one in the store differs.
    """
    checkpoints, step = find(url)
    root = cache_root() / "checkpoints" / checkpoints.url.replace("://", "/")
    return checkpoints.fetch(step, root, lambda name: not name.startswith("optimizer/") or name.endswith(".json"), True)


# ---- for runs ------------------------------------------------------------------------------------------------


def fetch_for_run(config: Config, fresh: bool, report: Report = quiet, say: Report = quiet) -> None:
    """Fetch the checkpoint that a run of `config` starts from, before the run looks in its folder; one process calls
    it.

    It is the newest checkpoint of the run's bucket, if that is newer than the newest intact one on this machine; for a
    run without checkpoints, the one that `resume_checkpoint_path` names. `report` is called with a line for what is
    damaged, `say` for what is fetched.

    Raises:
        InputError: the store cannot be read or written, or it holds checkpoints although the run is to begin afresh.
    """
    root, resume = config.checkpoint_folder, config.checkpoints.resume_checkpoint_path
    has_own = False
    if config.upload_url is not None:
        remote = RemoteCheckpoints(config.upload_url, config.remote_data)
        if fresh and remote.holds_any():
            raise InputError(f"--fresh: {remote.url} holds checkpoints, which are left as they are; set another path")
        remote.store.put(".kenotron", b"")  # fails now instead of after the first checkpoint
        remote.store.delete(".kenotron")
        make_folder(root)
        known = run_id(root)
        with durable.in_use(root):
            if fresh:
                remote.store.delete(RUN)
            else:
                check_same_run(remote, root, known)
            has_own = not fresh and _fetch_newest(remote, root, report, say)
    has_own = has_own or (not fresh and _holds_any(root))
    if resume is not None and "://" in resume and not has_own:
        _fetch_named(resume, config, say)


def _holds_any(root: Path) -> bool:
    return any(entry.manifest for entry in list_checkpoints(root))


def check_same_run(remote: RemoteCheckpoints, root: Path, known: str | None) -> None:
    """Make the run's id in `root`, which was `known` before the folder was opened, and in the store the same.

    A folder without checkpoints takes the id of the store's run, as does a folder without an id that has a checkpoint
    in common with the store. Raises InputError if both hold checkpoints of different runs, since uploads and retention
    of one would replace and remove those of the other.
    """
    there = ""
    with suppress(FileNotFoundError):
        there = remote.store.read(RUN).decode()
    others = there != known and remote.holds_any()
    if others and _holds_any(root) and (there if known else not _has_one_of(remote, root)):
        same = f", or if it is the same run, copy {remote.store.at(RUN)} to {root / RUN}" if there else ""
        raise InputError(f"{remote.url} holds the checkpoints of a different run from {root}; name another URL{same}")
    if there and others:
        (root / RUN).write_text(there)
    elif (here := run_id(root)) is not None and here != there:
        remote.store.put(RUN, here.encode())


def _has_one_of(remote: RemoteCheckpoints, root: Path) -> bool:
    """Return whether the store has one of the checkpoints in `root`, with the same manifest."""
    here = {entry.step: (entry.path / MANIFEST).read_bytes() for entry in list_checkpoints(root) if entry.manifest}
    there = [entry.step for entry in remote.all() if entry.manifest and entry.step in here]
    return any(remote.manifest(step)[0] == here[step] for step in there)


def _fetch_newest(remote: RemoteCheckpoints, root: Path, report: Report, say: Report) -> bool:
    """Fetch the store's newest checkpoint if it is newer than `root`'s; return whether `root` has one then."""
    tidy(root, report)
    saved = [entry for entry in reversed(list_checkpoints(root)) if entry.manifest]
    here = next((entry.manifest for entry in saved if not folders.verify(entry.path)), None)  # the newest intact one
    found = remote.all()
    for entry in reversed(found):
        if entry.manifest is None:
            report(f"skipping checkpoint {entry.step}: {entry.problem}")
            continue
        if here and here.saved_at >= entry.manifest.saved_at:
            break
        try:
            say(f"Fetching {entry.path}: {entry.manifest.bytes / 2**20:.2f}MiB")
            remote.fetch(entry.step, root)
        except Damaged as error:
            report(f"skipping checkpoint {entry.step}: {error}")
        else:
            return True
    if here is None and found:  # a new run's checkpoints would replace them
        raise InputError(f"no checkpoint at {remote.url} is intact, as warned above; restore one, or set another path")
    return here is not None


def _fetch_named(url: str, config: Config, say: Report) -> None:
    checkpoints, step = find(url, config.remote_data)
    folder = config.resume_folder
    assert folder is not None
    root = folder.parent if folder.name == str(step) and url.rstrip("/").endswith(f"/{step}") else folder
    here = folders.look(root / str(step), step).manifest
    if here != checkpoints.manifest(step)[1] or folders.verify(root / str(step)):
        say(f"Fetching {checkpoints.store.at(str(step))}")
        checkpoints.fetch(step, root)
    durable.replace_text(root / LATEST, str(step))
