"""Write `history.jsonl` in a run's folder, with a line for each start and each end of the run.

    {"iteration": 0, "event": "start", "time": "2026-11-29T08:15:02+00:00", "from": null, "last_step": 1000, …}
    {"iteration": 1000, "event": "finished", "time": "2026-11-29T08:19:40+00:00"}

A start without an end belongs to a run that is training, or was killed. `kenotron runs` and `report` read the file.
"""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from kenotron.models import named_parameters
from kenotron.parallel import device as devices
from kenotron.runs.files import HISTORY
from kenotron.training.hooks import Hook
from kenotron.training.run_folder import append_line
from kenotron.version import __version__

if TYPE_CHECKING:
    from kenotron.training.run import Run


class History(Hook):
    """Writes the lines; only on rank 0."""

    started = False

    def on_train_start(self, run: Run) -> None:
        """Write the checkpoint that the run starts from, its device and versions."""
        facts = {
            "from": str(run.start.path) if run.start.path else None,
            "last_step": run.last_step,
            "device": devices.name(run.device),
            "processes": run.config.parallelism.world_size,
            "parameters": sum(parameter.numel() for _, parameter in named_parameters(run.skeleton)),
            "kenotron": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        _write(run, "start", facts)
        self.started = True

    def on_train_end(self, run: Run) -> None:
        """Write that the run is finished, or the reason for its stop."""
        _write(run, "finished" if run.finished else "stopped", {"reason": run.stop_reason} if run.stop_reason else {})

    def on_error(self, run: Run, error: Exception) -> None:
        """Write the reason for the run's failure."""
        if self.started:
            _write(run, "failed", {"reason": str(error) or type(error).__name__})


def _write(run: Run, event: str, more: dict[str, Any]) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    append_line(run.config, HISTORY, {"iteration": run.step, "event": event, "time": now} | more)
