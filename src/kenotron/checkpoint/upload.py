"""Upload checkpoints in the background, so that a store never has a partial one under its name.

    uploader = Uploader(Path("checkpoints"), "s3://bucket/run", report=print)
    uploader.start()                  # starts a thread that uploads the folder's complete checkpoints, newest first
    uploader.wake()                   # after a save
    uploader.finish(print)            # {20: "s3://bucket/run/20/…: cannot be written, tried 5 times (…)"}; {}: all done

The order of objects is (`remote.py` explains why it is safe): manifest.json.incomplete, the files, manifest.json,
latest.txt. Each object is compared with its file when it is sent. A killed upload skips objects that equal their files
when it is resumed. No error of the store ends the thread: a checkpoint that could not be uploaded stays on this machine
and is retried.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path

from kenotron.checkpoint.durable import FileRecord, discard, hash_file
from kenotron.checkpoint.engine import KEEP_ALL, Keep
from kenotron.checkpoint.folders import LATEST, CheckpointFolder, RemoteCheckpoint, Report, list_checkpoints, quiet
from kenotron.checkpoint.manifest import MANIFEST, Manifest, parse
from kenotron.checkpoint.remote import INCOMPLETE, RemoteCheckpoints, wrong_sizes
from kenotron.checkpoint.retention import superseded
from kenotron.config.errors import CheckpointError, InputError
from kenotron.config.remote_data import RemoteData
from kenotron.parallel.ranks import describe
from kenotron.storage.stores import PARTS_AT_ONCE

FILES_AT_ONCE = 2

LOOK_EVERY_S = 5.0
"""Seconds between two scans of the folder: a save may become complete in the background."""

ENDED = "its upload was stopped"

RETRY_EVERY_S = 60.0
"""Seconds between two attempts, after an upload has failed."""


@dataclass
class Uploader:
    """Uploads complete checkpoints in the folder `root` to `url`, and applies retention there.

    With `remove`, uploaded checkpoints are removed from `root`, except the newest until `finish`.
    `beside`: a folder that is added to a checkpoint after it is complete (``hf``), and uploaded with it.
    `report` is called in the uploading thread with a line for each checkpoint that is uploaded or fails.
    """

    root: Path
    url: InitVar[str]
    settings: InitVar[RemoteData | None] = None
    _: KW_ONLY
    remove: bool = False
    keep: Keep = KEEP_ALL
    beside: str | None = None
    files_at_once: int = FILES_AT_ONCE
    parts_at_once: InitVar[int] = PARTS_AT_ONCE
    report: Report = quiet

    def __post_init__(self, url: str, settings: RemoteData | None, parts_at_once: int) -> None:
        self.remote = RemoteCheckpoints(url, settings, parts_at_once)
        self.store = self.remote.store
        self.may_prune = True
        self.protected: set[tuple[str, int]] = set()  # as in `Checkpoints`
        self.problems: dict[int, str] = {}  # step → why it is not uploaded
        self._uploaded: set[tuple[float, int]] = set()
        self._cleared = False
        self._seen: dict[int, RemoteCheckpoint] = {}  # complete checkpoints in the store
        self._sent: dict[str, int] = {}
        self._wake, self._last, self._closing = threading.Event(), False, False
        self._thread = threading.Thread(target=self._work, name="kenotron-upload", daemon=True)

    # ---- the thread ----

    def start(self) -> None:
        """Start the thread, which uploads present and future checkpoints."""
        self._thread.start()

    def wake(self) -> None:
        """Scan the folder at once, because something was saved."""
        self._wake.set()

    def finish(
        self, progress: Callable[[int, int], None] = lambda done, total: None, seconds: float | None = None
    ) -> dict[int, str]:
        """Wait until everything is uploaded or has failed once more; return step → reason of those that failed.

        `progress` is called twice a second with bytes done and total bytes. After `seconds` the uploads are ended.
        """
        end = None if seconds is None else time.monotonic() + seconds
        self._last = True
        self._wake.set()
        while self._thread.is_alive() and (end is None or time.monotonic() < end):
            self._thread.join(0.5 if end is None else min(0.5, max(end - time.monotonic(), 0)))
            progress(*self.progress())
        self.close()
        left = {entry.step: ENDED for entry in self.pending()}
        return left | self.problems

    def close(self) -> None:
        """End the thread after the file that it is sending, without waiting for it."""
        self._closing = True
        self._wake.set()

    def _work(self) -> None:
        while not self._closing:
            last = self._last  # read before the pass: an earlier pass may have failed long ago
            try:
                self.upload_pending(last)
            except OSError as error:  # an error of the local folder; the run continues
                self.report(f"{self.root}: {error}")
            if last:
                return
            self._wake.wait(RETRY_EVERY_S if self.problems else LOOK_EVERY_S)
            self._wake.clear()

    # ---- one pass ----

    def upload_pending(self, last: bool = True) -> None:
        """Upload complete checkpoints that are not in the store, newest first, and set `problems`.

        `last`: no more saves follow, so the newest is removed like the others.
        """
        problems: dict[int, str] = {}
        pending = self.pending(last)
        if not self._cleared:
            self._clear_halves({entry.step for entry in pending})
        for entry in reversed(pending):
            if self._closing:
                return
            self.protected.add(("upload", entry.step))
            try:
                self._upload(entry)
            except FileNotFoundError:
                if entry.path.exists():
                    problems[entry.step] = f"{entry.path} is not complete"
                else:  # retention or a user has removed it meanwhile
                    self._clear_halves({other.step for other in pending} - {entry.step})
            except Exception as error:  # the run continues after any error
                problems[entry.step] = describe(error)
                self._report_problem(entry, describe(error))
            finally:
                self.protected.discard(("upload", entry.step))
        self.problems = problems
        if self.remove:
            self._remove_local(last)

    def pending(self, last: bool = True) -> list[CheckpointFolder]:
        """Return the folder's complete checkpoints that are not known to be in the store, oldest save first."""
        found = [entry for entry in list_checkpoints(self.root) if entry.manifest]
        while found and self.beside and not last and not (found[-1].path / self.beside).is_dir():
            found.pop()  # its export is being written, or comes next
        return [entry for entry in found if _key(entry) not in self._uploaded]

    def progress(self) -> tuple[int, int]:
        """Return (bytes sent, total bytes) of the pending checkpoints."""
        total = sum(entry.manifest.bytes for entry in self.pending() if entry.manifest)
        return min(sum(self._sent.copy().values()), total), total

    def _report_problem(self, entry: CheckpointFolder, error: str) -> None:
        if self.problems.get(entry.step) != error:  # the same error is reported once
            there, here = self.remote.url, entry.path
            self.report(
                f"checkpoint {entry.step} was not uploaded to {there}: {error}; it stays in {here} and is retried"
            )

    def _clear_halves(self, completing: set[int]) -> None:
        """Remove incomplete uploads and removals from the store, except for the steps `completing`."""
        try:
            for step, objects in self.remote.objects().items():
                if INCOMPLETE in objects and MANIFEST in objects:
                    self.store.delete(f"{step}/{INCOMPLETE}")
                elif INCOMPLETE in objects and step not in completing:
                    self.remote.remove(step, None)
                    self.report(f"removed {self.store.at(str(step))}, which was incomplete")
            self._cleared = True
        except InputError:  # uploads report problems of the store; the next pass tries again
            pass

    # ---- one checkpoint ----

    def _upload(self, entry: CheckpointFolder) -> None:
        started, manifest = time.perf_counter(), entry.manifest
        assert manifest is not None
        self._sent.clear()
        data = (entry.path / MANIFEST).read_bytes()
        sent = 0
        if not self._is_there(entry.step, data):
            sent = self._send_all(entry, manifest, data)
            if self._closing:
                return
        self._finish_store()
        self._uploaded.add(_key(entry))
        if sent:
            seconds = time.perf_counter() - started
            self.report(f"Uploaded {self.store.at(str(entry.step))}: {sent / 2**20:.2f}MiB in {seconds:.2f} s")

    def _is_there(self, step: int, data: bytes) -> bool:
        """Return whether the store has exactly this checkpoint; a different or partial one of the step is removed."""
        objects = {name.partition("/")[2]: size for name, size in self.store.sizes(str(step)).items()}
        if MANIFEST in objects:
            there = self.store.read(f"{step}/{MANIFEST}")
            if there == data and not wrong_sizes("", parse(data, MANIFEST), objects):
                return True
            self._seen.pop(step, None)
            self.remote.remove(step, there)
        elif INCOMPLETE in objects and self.store.read(f"{step}/{INCOMPLETE}") != data:
            self.remote.remove(step, None)
        return False

    def _send_all(self, entry: CheckpointFolder, manifest: Manifest, data: bytes) -> int:
        """Send a checkpoint's objects in the order that keeps the store consistent; return the bytes sent."""
        step, files = entry.step, dict(manifest.files)
        if self.beside:
            for path in sorted((entry.path / self.beside).rglob("*")):
                if path.is_file():
                    files[path.relative_to(entry.path).as_posix()] = FileRecord(path.stat().st_size, "")
        self.store.put(f"{step}/{INCOMPLETE}", data)
        sent = self._send_files(entry, files)
        if self._closing:
            return sent
        objects = {name.partition("/")[2]: size for name, size in self.store.sizes(str(step)).items()}
        everything = Manifest(step, manifest.saved_at, {}, files)
        if problem := wrong_sizes(self.store.at(str(step)), everything, objects):
            raise CheckpointError(f"{problem}, after the upload")
        self.store.put(f"{step}/{MANIFEST}", data)
        return sent

    def _send_files(self, entry: CheckpointFolder, files: dict[str, FileRecord]) -> int:
        """Send the files that the store lacks, several at a time; return bytes sent. Raises the first error."""
        there = self.store.sizes(str(entry.step))
        left, sent, errors = deque(sorted(files.items())), list[int](), list[BaseException]()

        def work() -> None:
            while not errors and not self._closing:
                try:
                    name, record = left.popleft()
                except IndexError:
                    return
                try:
                    sent.append(self._send_file(entry, name, record, there))
                except BaseException as error:
                    errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.files_at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return sum(sent)

    def _send_file(self, entry: CheckpointFolder, name: str, record: FileRecord, there: dict[str, int]) -> int:
        place, path = f"{entry.step}/{name}", entry.path / name
        if there.get(place) == record.bytes and self.store.holds(place, path):
            self._sent[name] = record.bytes
            return 0

        def count(done: int) -> None:
            self._sent[name] = done

        if record.xxh3 and hash_file(path) != record:
            raise CheckpointError(f"{path} is damaged: its checksum is not the one in the manifest")
        self.store.upload(place, path, count)
        return record.bytes

    # ---- what follows an upload ----

    def _finish_store(self) -> None:
        """Write `latest.txt`, delete marks of complete checkpoints, and remove those that retention does not keep."""
        objects = self.remote.objects()
        self._seen = {step: found for step, found in self._seen.items() if MANIFEST in objects.get(step, {})}
        for step, names in objects.items():
            if MANIFEST in names and step not in self._seen:
                self._seen[step] = self.remote.look(step, names)
            if MANIFEST in names and INCOMPLETE in names:
                self.store.delete(f"{step}/{INCOMPLETE}")
        complete = [entry for entry in self._seen.values() if entry.manifest]
        newest, named = str(max(complete, key=_key).step).encode(), b""
        with suppress(FileNotFoundError):
            named = self.store.read(LATEST)
        if named != newest:
            self.store.put(LATEST, newest)
        for entry in superseded(complete, self.keep if self.may_prune else KEEP_ALL):
            self.remote.remove(entry.step, self.remote.manifest(entry.step)[0])
            del self._seen[entry.step]

    def _remove_local(self, last: bool) -> None:
        found = [entry for entry in list_checkpoints(self.root) if entry.manifest]
        for entry in found if last else found[:-1]:
            if _key(entry) in self._uploaded:
                with suppress(CheckpointError):  # a failure only costs space
                    discard(entry.path)


def _key(entry: CheckpointFolder | RemoteCheckpoint) -> tuple[float, int]:
    """Return a key that distinguishes checkpoints of one step and sorts by time of saving."""
    assert entry.manifest is not None
    return entry.manifest.saved_at, entry.step
