"""`checkpoints.export_hf`: export every checkpoint to a folder `hf` in its folder, which transformers loads.

    checkpoints/100/model/, optimizer/, manifest.json, …       the checkpoint: complete before the export begins
    checkpoints/100/hf/config.json, model.safetensors, …       renamed to this when it is complete

A process that is killed between the two leaves a checkpoint without its export; the run that resumes from it writes the
export, and if it was the last checkpoint, the next start does. Retention removes both together.

With an engine that saves in the background, a separate process writes the export in the background as well:

    save 10 ──▶ checkpoint 10 complete ──▶ export 10 beside the steps 12, 13, … ──▶ "Exported to checkpoints/10/hf"

One export runs at a time: if the next checkpoint is complete before the previous export, training waits for the export.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron import interop
from kenotron.checkpoint.folders import list_checkpoints
from kenotron.config.errors import InputError, RunFailed, naming
from kenotron.interop.background_export import BackgroundExport
from kenotron.interop.hf_config import hf_config
from kenotron.parallel.ranks import run_on_rank0
from kenotron.storage.files import remove_leftovers
from kenotron.training.console import logger, mebibytes
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

FOLDER = "hf"


class ExportHook(Hook):
    """Exports each checkpoint when it is saved: all ranks together, or a background process of rank 0."""

    priority = -55
    background: BackgroundExport | None = None  # on rank 0: the export in flight
    started = 0.0

    def on_train_start(self, run: Run) -> None:
        """Raise InputError if the model cannot be exported, and repeat an interrupted export."""
        model = run.config.model

        def check() -> None:
            hf_config(model.decoder, model.dtype, model.decoder.eos_token_id)

        with naming("checkpoints.export_hf"):
            run_on_rank0(check)  # transformers takes seconds to import: no other rank needs it
        path = run.config.checkpoint_folder / str(run.start.durable_step)  # local checkpoints have no export
        if run_on_rank0(lambda: path.is_dir() and not (path / FOLDER).is_dir()):
            self.on_save(run, path)

    def on_save(self, run: Run, path: Path) -> None:
        """Write `<path>/hf`, or start to. Raises RunFailed if it cannot be written; the checkpoint remains complete."""
        if not run.checkpoints.engine.in_background:
            export_now(path)
        elif run.mesh.is_first:
            self._settle(run)
            remove_leftovers(path / FOLDER)
            run.checkpoints.protected.add(("export", int(path.name)))
            self.started, self.background = time.perf_counter(), BackgroundExport(path, path / FOLDER)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Log the end of an export in the background."""
        if self.background is not None and self.background.ended:
            self._settle(run)

    def on_train_end(self, run: Run) -> None:
        """Wait for the last export. Raises RunFailed if it failed."""
        if problem := run_on_rank0(lambda: self._settle(run)):
            raise RunFailed(problem)

    def on_close(self, run: Run) -> None:
        """After an error, stop the export in flight, which the next start repeats."""
        if self.background is not None:
            self.background.stop()

    def _settle(self, run: Run) -> str | None:
        """Wait, on rank 0, for the export in flight, log its result, and return its problem, if it has one."""
        export, self.background = self.background, None
        if export is None:
            return None
        try:
            _log_export(export.target, export.wait(), self.started)
        except InputError as error:
            logger.error("%s", _failed(export.source, error))
            return _failed(export.source, error)
        finally:
            run.checkpoints.protected.discard(("export", int(export.source.name)))
        return None


def export_now(path: Path) -> None:
    """Write `<path>/hf` now, with all ranks, which each write some of the files. Raises RunFailed."""
    started = time.perf_counter()
    try:
        run_on_rank0(lambda: remove_leftovers(path / FOLDER))
        written = interop.to_hf(path, path / FOLDER, verify=False)
    except InputError as error:
        raise RunFailed(_failed(path, error)) from error
    _log_export(written.path, written.bytes, started)


def export_last(config: Config) -> None:
    """Export the last checkpoint of a run that has ended, if it has no export. All ranks call it. Raises RunFailed."""

    def missing() -> list[Path]:
        last = list_checkpoints(config.checkpoint_folder)[-1:]
        return [entry.path for entry in last if not (entry.path / FOLDER).is_dir()]

    for path in run_on_rank0(missing):
        export_now(path)


def _failed(path: Path, error: InputError) -> str:
    return f"step {path.name}: checkpoints.export_hf: {error}; the checkpoint is complete"


def _log_export(target: Path, size: int, started: float) -> None:
    logger.info("Exported to %s: %s in %.2f s", target, mebibytes(size), time.perf_counter() - started)
