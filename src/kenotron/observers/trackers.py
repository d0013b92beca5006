"""`logging.wandb` and `logging.trackio`: send the metrics of every step to Weights & Biases, and to Trackio.

A run that continues from its checkpoint continues its curves; a new run of the same name is a separate run of the
tracker. Errors of a tracker during the run are only warnings, since metrics.jsonl has the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kenotron.config import to_dict
from kenotron.config.errors import InputError
from kenotron.runs.files import HISTORY, logged_lines
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.run_folder import log_folder

if TYPE_CHECKING:
    from kenotron.config.logging import Trackio, Wandb
    from kenotron.training.metrics import EvaluationResult
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class Tracker(Hook):
    """The base class of both trackers; only on rank 0."""

    priority = -15  # after the line of metrics
    package = ""

    def __init__(self, settings: Wandb | Trackio) -> None:
        self.settings: Any = settings
        self.run: Any = None  # the tracker's run object
        self.sent_step = 0

    def open(self, run: Run, package: Any) -> Any:
        """Start or continue the tracker's run with its `package`, and return it."""
        raise NotImplementedError

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""
        self.run.log(dict(metrics), step=step)

    def send_evaluation(self, result: EvaluationResult) -> None:
        """Log evaluation results of a checkpoint, possibly of an earlier step."""
        self.send(result.metrics, result.step)

    def on_train_start(self, run: Run) -> None:
        """Start or continue the tracker's run. Raises InputError if the package is missing, or the tracker refuses."""
        try:
            package = import_module(self.package)
        except ModuleNotFoundError:
            raise InputError(
                f"logging.{self.package}: it needs the package {self.package}: pip install 'kenotron[trackers]'"
            ) from None
        self.sent_step = run.step
        self.run = self.open(run, package)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Send the step's metrics."""
        self.sent_step = run.step
        self._try(self.send, run.last_metrics, run.step)

    def after_evaluation(self, run: Run, result: EvaluationResult) -> None:
        """Send the results."""
        self._try(self.send_evaluation, result)

    def on_error(self, run: Run, error: Exception) -> None:
        """Send the metrics of the last step, if another hook failed before they were sent."""
        if run.last_result is not None and self.sent_step < run.step:
            self.after_step(run, run.last_result)

    def on_close(self, run: Run) -> None:
        """End the tracker's run."""
        if self.run is not None:
            self.run.finish()

    def _try(self, send: Any, *arguments: Any) -> None:
        if self.run is None:
            return
        try:
            send(*arguments)
        except Exception as error:
            logger.warning("logging.%s: %s; the run goes on without it", self.package, error)
            self.run = None


class WandbHook(Tracker):
    """Sends to Weights & Biases under the names of metrics.jsonl; its files are in `wandb` in the run's folder."""

    package = "wandb"

    def open(self, run: Run, package: Any) -> Any:
        """Open the run with an id of its name and first start. Without a network it logs offline."""
        settings, name = self.settings, self.settings.name or run.config.general.run
        _, first = next(logged_lines(log_folder(run.config) / HISTORY))
        arguments = {
            "project": settings.project or run.config.general.project,
            "entity": settings.entity,
            "name": name,
            "tags": settings.tags,
            "id": "".join(letter if letter.isalnum() else "-" for letter in f"{name[:64]}-{first['time'][:19]}"),
            "resume": "allow",
            "config": to_dict(run.config),
            "dir": str(log_folder(run.config)),
            "settings": package.Settings(console="off"),  # the run's log files have the output of all ranks
        }
        try:
            opened = self._open(package, arguments)
        except (package.errors.UsageError, package.errors.AuthenticationError) as error:
            raise InputError(f"logging.wandb: {error} (logging.wandb.mode: offline needs no account)") from error
        opened.define_metric("eval/*", step_metric="eval_step")
        return opened

    def _open(self, package: Any, arguments: dict[str, Any]) -> Any:
        try:
            return package.init(mode=self.settings.mode, **arguments)
        except package.errors.AuthenticationError:
            raise
        except package.errors.CommError as error:
            logger.warning("logging.wandb: %s; it logs offline, for `wandb sync`", error)
            return package.init(mode="offline", **arguments)

    def send(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step, unless wandb has them from before a resume."""
        if step >= self.run.step:
            super().send(metrics, step)

    def send_evaluation(self, result: EvaluationResult) -> None:
        """Log the results at the newest step, since the steps of wandb only increase."""
        self.run.log({"eval_step": result.step, **result.metrics}, step=max(self.sent_step, self.run.step))


class TrackioHook(Tracker):
    """Sends to Trackio: to a database on this machine, or with `space_id` to a Space of Hugging Face."""

    package = "trackio"

    def open(self, run: Run, package: Any) -> Any:
        """Open a new run, or the newest of its name if the run continues."""
        return package.init(
            project=self.settings.project or run.config.general.project,
            name=self.settings.name or run.config.general.run,
            space_id=self.settings.space_id,
            resume="allow" if run.start.continues else "never",
            config=to_dict(run.config),
            embed=False,
        )
