"""Hooks: everything of a run that is not the step itself.

A hook overrides the moments that it cares about; every method here does nothing. Metrics, validation,
checkpoints, guards, signals, profiler and progress bar are all hooks, and so may be yours:

    class StopWhenGood(Hook):
        def after_step(self, run, result):
            if result.lm_loss < 2.0:
                run.stop("the loss is good enough")

    general: {hooks: [my_package.StopWhenGood]}

State that must survive a restart goes through `state_dict`: JSON values, saved in every checkpoint's manifest.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from kenotron.train.run import Run
    from kenotron.train.step import StepResult
    from kenotron.train.validation import ValidationResult


class Hook:
    """No-op moments of a run, in the order in which they happen."""

    def on_train_start(self, run: Run) -> None:
        """Model, data and optimizer are ready; `run.step` steps were done before."""

    def before_step(self, run: Run) -> None:
        """The next step's batch is at hand."""

    def before_update(self, run: Run) -> None:
        """Gradients are clipped and finite; weights change next. A fence for whoever still reads them."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """`run.step` has just been done."""

    def after_validation(self, run: Run, result: ValidationResult) -> None:
        """A validation pass has just been done."""

    def on_save(self, run: Run, path: Path) -> None:
        """A checkpoint stands whole at `path`."""

    def on_train_end(self, run: Run) -> None:
        """No more steps will come; also called when the run is stopped early."""

    def on_close(self, run: Run) -> None:
        """Let go of files and threads; called even after an error."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values to find again after a restart."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` returned when the checkpoint was saved."""


def load_hook(path: str, kwargs: dict[str, Any]) -> Hook:
    """The user's hook named by a dotted path, called with `kwargs`."""
    make = import_dotted(path, "general.hooks")
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as error:
        raise InputError(f"general.hooks: {path} does not take {kwargs or 'no arguments'}: {error}") from None
    hook = make(**kwargs)
    if not isinstance(hook, Hook):
        raise InputError(f"general.hooks: {path} made a {type(hook).__name__}, expected a kenotron.train.Hook")
    return hook
