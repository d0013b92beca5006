"""The loop, and everything of a run around it.

run.py         Run, fit, close: read this first
step.py        one step: forward, backward, clip, update
setup.py       how a run is put together
hooks.py       the moments that everything else hangs on
saving.py      checkpoints and exact resume
metrics.py, validation.py, guards.py, observing.py, console.py
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

from kenotron.train.guards import RunFailed
from kenotron.train.hooks import Hook
from kenotron.train.run import Run

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh

__all__ = ["Hook", "Run", "RunFailed", "train"]


def train(config: Config, mesh: Mesh, device: torch.device, *, fresh: bool = False) -> Run | None:
    """Train as `config` says, from its newest checkpoint if there is one. Returns the run.

    `fresh` sets earlier checkpoints aside and starts at step 0. A run whose checkpoint already has all its
    steps says so and gives None: nothing was loaded.
    """
    from kenotron.checkpoint.ranks import on_first
    from kenotron.config import refuse_unsupported
    from kenotron.train import console, report, saving
    from kenotron.train.setup import resolve_architecture

    refuse_unsupported(config)
    console.start_logging(config, mesh)
    if mesh.is_first:
        report.first_line(config)
    config = on_first(lambda: resolve_architecture(config))
    with saving.own_folder(config):
        return _train(config, mesh, device, fresh)


def _train(config: Config, mesh: Mesh, device: torch.device, fresh: bool) -> Run | None:
    from kenotron.checkpoint.ranks import on_first
    from kenotron.config import fill_run_name
    from kenotron.parallel.arrival import wait_for_all
    from kenotron.train import report, saving
    from kenotron.train.run import close, fit
    from kenotron.train.setup import open_log, prepare

    config, start = saving.choose_start(config, fresh)
    config = on_first(lambda: fill_run_name(config, datetime.now(), os.environ.get("SLURM_JOB_ID")))  # one clock
    if start.continues and start.step >= config.tokens.train_steps:
        if mesh.is_first:
            report.already_finished(config, start)
        return None
    run = prepare(config, mesh, device, start)
    try:
        wait_for_all()
        saving.restore(run, start)
        if mesh.is_first:
            open_log(run.config, start)
        if not run.finished:
            if mesh.is_first:
                report.training_plan(run)
            fit(run)
            if mesh.is_first:
                report.farewell(run)
        elif mesh.is_first:
            report.exhausted(run)
    finally:
        close(run)
    return run
