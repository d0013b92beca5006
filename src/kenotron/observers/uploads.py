"""Checkpoints on S3 and other stores: uploaded while training goes on, by rank 0.

No failure of the store ends the run: it is a warning, the checkpoint stays on this machine, and is tried again. The end
of the run waits for what is not uploaded yet; what could not be is the run's error then (exit code 1).
"""

from __future__ import annotations

import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.checkpoint.engine import Keep
from kenotron.checkpoint.upload import FILES_AT_ONCE, Uploader
from kenotron.config.errors import RunFailed
from kenotron.observers.export import FOLDER
from kenotron.storage.stores import PARTS_AT_ONCE
from kenotron.training.console import logger, mebibytes
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

SAY_EVERY_S = 10.0

STOPPED_WAIT_S = 60.0
"""Seconds that a run waits for its uploads when it was asked to stop: a job is killed at its time limit, and requeued
only if it has ended before."""


def uploader(config: Config, url: str) -> tuple[Uploader, deque[str]]:
    """The uploader that a config asks for, and the lines that it reports."""
    lines: deque[str] = deque()
    section, checkpoints = config.s3_upload, config.checkpoints
    made = Uploader(
        config.checkpoint_folder,
        url,
        config.remote_data,
        remove=checkpoints.remove_after_upload or (section is not None and section.remove_after_upload),
        keep=Keep(checkpoints.keep_last, checkpoints.keep_every, best=checkpoints.keep_best),
        beside=FOLDER if checkpoints.export_hf else None,
        files_at_once=(section and section.s5cmd_numworkers) or FILES_AT_ONCE,
        parts_at_once=(section and section.s5cmd_concurrency) or PARTS_AT_ONCE,
        report=lines.append,
    )
    return made, lines


def finish(made: Uploader, lines: deque[str], seconds: float | None = None) -> None:
    """Wait for the uploads, at most `seconds`, logging progress. Raises RunFailed that names what failed."""
    started = said = time.monotonic()
    first: int | None = None

    def progress(done: int, total: int) -> None:
        nonlocal said, first
        _log(lines)
        first = done if first is None else first
        now = time.monotonic()
        if total and now - said >= SAY_EVERY_S:
            said, rate = now, (done - first) / (now - started)
            eta = str(timedelta(seconds=round((total - done) / rate))) if rate > 0 else "unknown"
            logger.info("Uploading: %.0f%% of %s | ETA %s", 100 * done / total, mebibytes(total), eta)

    problems = made.finish(progress, seconds)
    _log(lines)
    if problems and seconds is not None and not made.problems:
        _say_left(made)
    elif problems:
        steps, here, there = ", ".join(map(str, sorted(problems))), made.root, made.remote.url
        raise RunFailed(
            f"not uploaded to {there}: checkpoint {steps} ({problems[max(problems)]}); complete in {here}, to be "
            f"uploaded by the next start, or by `kenotron checkpoint upload {here} {there}`"
        )


def _say_left(made: Uploader) -> None:
    if steps := [str(entry.step) for entry in made.pending()]:
        logger.warning("not uploaded yet: checkpoint %s in %s; the next start uploads it", ", ".join(steps), made.root)


def _log(lines: deque[str]) -> None:
    while lines:
        line = lines.popleft()
        (logger.info if line.startswith("Uploaded") else logger.warning)("%s", line)


class Uploads(Hook):
    """Uploads each checkpoint after it is saved, in a thread; on rank 0. The last hook: it waits for the rest."""

    priority = -90

    def __init__(self, config: Config, url: str) -> None:
        self.uploader, self.lines = uploader(config, url)

    def on_train_start(self, run: Run) -> None:
        """Begin with what an earlier process left on this machine."""
        self.uploader.protected |= run.checkpoints.protected
        run.checkpoints.protected = self.uploader.protected
        self.uploader.start()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log what was uploaded, and what could not be."""
        _log(self.lines)

    def on_save(self, run: Run, path: Path) -> None:
        """Upload it. After a skipped step nothing is removed from the store, as in the folder."""
        self.uploader.may_prune = run.last_result is None or not run.last_result.skipped
        self.uploader.wake()

    def on_train_end(self, run: Run) -> None:
        """Wait for the uploads, as long as there is time. Raises RunFailed if one failed."""
        finish(self.uploader, self.lines, STOPPED_WAIT_S if run.interrupted else None)

    def on_error(self, run: Run, error: Exception) -> None:
        """Say what is on this machine only."""
        _say_left(self.uploader)

    def on_close(self, run: Run) -> None:
        """End the thread."""
        self.uploader.close()
        _log(self.lines)
