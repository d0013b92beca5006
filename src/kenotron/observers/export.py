"""`checkpoints.export_hf`: every checkpoint's folder gets a folder `hf`, which transformers loads.

    checkpoints/100/model/, optimizer/, manifest.json, …       the checkpoint: complete before the export begins
    checkpoints/100/hf/config.json, model.safetensors, …       renamed to this when it is complete

A process that is killed between the two leaves a checkpoint without its export; the run that resumes from it writes it.
Retention removes both together.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron import interop
from kenotron.config.errors import InputError, RunFailed
from kenotron.interop.hf_config import hf_config
from kenotron.parallel.ranks import run_on_rank0
from kenotron.storage.files import remove_leftovers
from kenotron.training.console import logger, mebibytes
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run

FOLDER = "hf"


class ExportHook(Hook):
    """Exports each checkpoint when it is saved, on all ranks: each writes some of the files."""

    priority = -55

    def on_train_start(self, run: Run) -> None:
        """Refuse now what cannot be exported later, and make up for an export that was interrupted."""
        model = run.config.model

        def check() -> None:
            hf_config(model.decoder, model.dtype, model.decoder.eos_token_id)

        try:
            run_on_rank0(check)  # transformers takes seconds to import: no other rank needs it
        except InputError as error:
            raise InputError(f"checkpoints.export_hf: {error}") from None
        path = run.config.checkpoint_folder / str(run.step)
        if run_on_rank0(lambda: path.is_dir() and not (path / FOLDER).is_dir()):
            self.on_save(run, path)

    def on_save(self, run: Run, path: Path) -> None:
        """Write `<path>/hf`. Raises RunFailed if it cannot be written; the checkpoint is complete all the same."""
        started = time.perf_counter()
        try:
            run_on_rank0(lambda: remove_leftovers(path / FOLDER))
            written = interop.to_hf(path, path / FOLDER, verify=False)
        except InputError as error:
            raise RunFailed(f"step {run.step}: checkpoints.export_hf: {error}; the checkpoint is complete") from error
        seconds = time.perf_counter() - started
        logger.info("Exported to %s: %s in %.2f s", written.path, mebibytes(written.bytes), seconds)
