"""Hooks: all that a run does besides the training step itself.

A hook overrides the methods it needs; the base class's methods do nothing. Metrics, validation, checkpoints, guards,
signals, profiler and progress bar are hooks, and you can add your own:

    import kenotron as kn

    class StopWhenGood(kn.Hook):
        def after_step(self, run, result):
            run.record_metric("perplexity", math.exp(result.lm_loss))
            if result.lm_loss < 2.0:
                run.stop("the loss is good enough")

    general: {hooks: [my_package.StopWhenGood]}

Hooks are called by descending `priority`, hooks of equal priority in the order of the list:

    buffers and loads of experts 70 · cause of NaN 65 · spikes 60 · loss scale 55 · profiler 50 · validation 40
    · statistics of layers 30 · your own, data stalls, same data, history 0 · state hash -5 · metrics -10 · TensorBoard,
    trackers -15 · non-finite guard -20 · progress -30 · slow ranks -35 · signals -40 · replicas -45 · checkpoints -50
    · exports -55 · evaluations -65 · generated samples -70 · benchmark row -80 · uploads -90

So the metrics that a hook records in `after_step` are in that step's line, and checkpoints are saved near the end of a
step. State that has to survive a restart goes through `state_dict`: JSON values, saved in every checkpoint's manifest,
and tensors, saved in its folder `hooks`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError, nearest

if TYPE_CHECKING:
    from pathlib import Path

    from kenotron.training.metrics import EvaluationResult, ValidationResult
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class Hook:
    """Base class of hooks, with methods that do nothing, in the order of their calls."""

    priority: ClassVar[int] = 0
    """Hooks of higher priority are called first. Metrics, at -10, write the step's line."""

    def on_train_start(self, run: Run) -> None:
        """Called when model, data and optimizer are ready; `run.step` steps were done before."""

    def before_step(self, run: Run) -> None:
        """Called when the next step's batches are loaded in `run.batches`, which a hook may replace."""

    def accepts_update(self, run: Run, lm_loss: float, grad_norm: float) -> bool:
        """Return whether this step, whose numbers are finite, may change the weights; the same on all ranks."""
        return True

    def before_update(self, run: Run) -> None:
        """Called when gradients are clipped and finite, before the optimizer changes the weights."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """Called when step `run.step` is done, or was skipped (`result.skipped`)."""

    def after_validation(self, run: Run, result: ValidationResult) -> None:
        """Called when a validation pass is complete."""

    def after_evaluation(self, run: Run, result: EvaluationResult) -> None:
        """Called on rank 0 when a checkpoint has been evaluated, possibly the checkpoint of an earlier step."""

    def on_save(self, run: Run, path: Path) -> None:
        """Called when a checkpoint is complete at `path`, in checkpoints_path; background saves may lag by steps."""

    def on_train_end(self, run: Run) -> None:
        """Called after the last step, also if the run is stopped early, but not after an error."""

    def on_error(self, run: Run, error: Exception) -> None:
        """Called when the run fails with `error`, which is raised again after all hooks were called."""

    def on_close(self, run: Run) -> None:
        """Release files and threads; always called, also after an error."""

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values and tensors to restore after a restart; called on all ranks.

        Only rank 0's are saved, except DTensors: all ranks return them, and every rank's block is saved.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that rank 0's `state_dict` returned at the save; tensors are whole, on the CPU."""


def load_hook(path: str, kwargs: dict[str, object]) -> Hook:
    """Return the hook that the class or function at a dotted path makes of `kwargs`.

    Raises InputError if `path` does not take `kwargs`, or does not return a hook.
    """
    hook = find_hook(path, kwargs)(**kwargs)
    if not isinstance(hook, Hook):
        raise InputError(f"general.hooks: {path} made a {type(hook).__name__}, expected a kenotron.Hook")
    return hook


def find_hook(path: str, kwargs: dict[str, object]) -> Callable[..., Any]:
    """Return the class or function at a dotted path, without a call. Raises the errors of `load_hook` known by then."""
    make = import_dotted(path, "general.hooks")
    if not callable(make) or (isinstance(make, type) and not issubclass(make, Hook)):
        raise InputError(f"general.hooks: expected a kenotron.Hook class, or a function that returns one, at '{path}'")
    for name in dir(make) if isinstance(make, type) else ():
        if name.startswith(("on_", "before_", "after_", "accepts_")) and not hasattr(Hook, name):
            near = nearest(name, vars(Hook))
            raise InputError(f"general.hooks: {path}.{name} is never called: kenotron.Hook has no such method{near}")
    try:
        inspect.signature(make).bind(**kwargs)
    except TypeError as error:
        arguments = f"kwargs {kwargs}" if kwargs else "no kwargs"
        raise InputError(f"general.hooks: {path} cannot be called with {arguments}: {error}") from None
    except ValueError:  # a function in C without a signature
        pass
    return make
