"""Upload checkpoints to S3 and other stores during training, on rank 0.

No failure of the store ends the run: it is logged as a warning, the checkpoint stays on this machine, and the upload is
tried again. At its end the run waits for the remaining uploads, and fails if one failed (exit code 1).
"""

from __future__ import annotations

import logging
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

LOG_EVERY_S = 10.0

STOPPED_WAIT_S = 60.0
"""Seconds that a run waits for its uploads if it was asked to stop: it must end before the time limit of its job, which
is requeued only then."""


def build_uploader(config: Config, url: str) -> tuple[Uploader, deque[str]]:
    """Return the uploader of a config, and a queue of the lines that it reports."""
    lines: deque[str] = deque()
    section, checkpoints = config.s3_upload, config.checkpoints
    uploader = Uploader(
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
    return uploader, lines


def finish(uploader: Uploader, lines: deque[str], seconds: float | None = None) -> None:
    """Wait for the uploads, at most `seconds`, and log progress. Raises RunFailed with the failed checkpoints."""
    started = logged = time.monotonic()
    first: int | None = None

    def progress(done: int, total: int) -> None:
        nonlocal logged, first
        _log(lines)
        first = done if first is None else first
        now = time.monotonic()
        if total and now - logged >= LOG_EVERY_S:
            logged, rate = now, (done - first) / (now - started)
            eta = str(timedelta(seconds=round((total - done) / rate))) if rate > 0 else "unknown"
            logger.info("Uploading: %.0f%% of %s | ETA %s", 100 * done / total, mebibytes(total), eta)

    problems = uploader.finish(progress, seconds)
    _log(lines)
    if problems and seconds is not None and not uploader.problems:
        _warn_of_pending(uploader)
    elif problems:
        steps, folder, url = ", ".join(map(str, sorted(problems))), uploader.root, uploader.remote.url
        raise RunFailed(
            f"not uploaded to {url}: checkpoint {steps} ({problems[max(problems)]}); complete in {folder}, to be "
            f"uploaded by the next start, or by `kenotron checkpoint upload {folder} {url}`"
        )


def _warn_of_pending(uploader: Uploader) -> None:
    if steps := ", ".join(str(entry.step) for entry in uploader.pending()):
        logger.warning("not uploaded yet: checkpoint %s in %s; the next start uploads it", steps, uploader.root)


def _log(lines: deque[str]) -> None:
    while lines:
        line = lines.popleft()
        logger.log(logging.INFO if line.startswith("Uploaded") else logging.WARNING, "%s", line)


class Uploads(Hook):
    """Uploads each checkpoint after it is saved, in a thread; on rank 0. As the last hook it waits for the rest."""

    priority = -90

    def __init__(self, config: Config, url: str) -> None:
        self.uploader, self.lines = build_uploader(config, url)

    def on_train_start(self, run: Run) -> None:
        """Start with the checkpoints that an earlier process left on this machine."""
        self.uploader.protected |= run.checkpoints.protected
        run.checkpoints.protected = self.uploader.protected
        self.uploader.start()

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log uploads and their failures."""
        _log(self.lines)

    def on_save(self, run: Run, path: Path) -> None:
        """Upload the checkpoint. After a skipped step nothing is removed from the store, as in the local folder."""
        self.uploader.may_prune = run.last_result is None or not run.last_result.skipped
        self.uploader.wake()

    def on_train_end(self, run: Run) -> None:
        """Wait for the uploads, for a limited time if the run was stopped. Raises RunFailed if one failed."""
        finish(self.uploader, self.lines, STOPPED_WAIT_S if run.interrupted else None)

    def on_error(self, run: Run, error: Exception) -> None:
        """Log the checkpoints that are not uploaded."""
        _warn_of_pending(self.uploader)

    def on_close(self, run: Run) -> None:
        """Stop the thread."""
        self.uploader.close()
        _log(self.lines)
