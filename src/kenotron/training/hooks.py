"""Hooks: everything a run does besides the training step itself.

A hook overrides the methods it needs; every method here does nothing. Metrics, validation, checkpoints, guards,
signals, profiler and progress bar are hooks, and so is a user's own:

    import kenotron as kn

    class StopWhenGood(kn.Hook):
        def after_step(self, run, result):
            run.record_metric("perplexity", math.exp(result.lm_loss))
            if result.lm_loss < 2.0:
                run.stop("the loss is good enough")

    general: {hooks: [my_package.StopWhenGood]}

Hooks are called by descending `priority`, those of equal priority in the order of the list:

    buffers and loads of experts 70 · cause of NaN 65 · spikes 60 · loss scale 55 · profiler 50 · validation 40
    · statistics of layers 30 · your own, data stalls, same data, history 0 · state hash -5 · metrics -10 · TensorBoard,
    trackers -15 · non-finite guard -20 · progress -30 · slow ranks -35 · signals -40 · replicas -45 · checkpoints -50
    · exports -55 · evaluations -65 · generated samples -70 · benchmark row -80 · uploads -90

So what a hook records in `after_step` is part of that step's line, and a checkpoint is the last thing a step does.
State that has to survive a restart goes through `state_dict`: JSON values, saved in every checkpoint's manifest, and
tensors, saved in its folder `hooks`.
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
    """Base class of hooks: methods that do nothing, in the order in which they are called."""

    priority: ClassVar[int] = 0
    """Hooks of higher priority are called first. Metrics, at -10, write the step's line."""

    def on_train_start(self, run: Run) -> None:
        """Model, data and optimizer are ready; `run.step` steps were done before."""

    def before_step(self, run: Run) -> None:
        """The next step's batch has been loaded: `run.batches`, which a hook may replace."""

    def accepts_update(self, run: Run, lm_loss: float, grad_norm: float) -> bool:
        """Whether this step may change the weights; its numbers are finite. The answer is the same on all ranks."""
        return True

    def before_update(self, run: Run) -> None:
        """Gradients are clipped and finite; the optimizer changes the weights next."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """Step `run.step` is done, or was skipped (`result.skipped`)."""

    def after_validation(self, run: Run, result: ValidationResult) -> None:
        """A validation pass is complete."""

    def after_evaluation(self, run: Run, result: EvaluationResult) -> None:
        """A checkpoint has been evaluated, perhaps that of an earlier step; on rank 0."""

    def on_save(self, run: Run, path: Path) -> None:
        """A complete checkpoint is in `path`, in checkpoints_path; with background saves perhaps of an earlier step."""

    def on_train_end(self, run: Run) -> None:
        """No more steps follow; also called when the run is stopped early, but not after an error."""

    def on_error(self, run: Run, error: Exception) -> None:
        """The run fails with `error`, which is raised again after all hooks were called."""

    def on_close(self, run: Run) -> None:
        """Release files and threads; always called, after an error too."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values and tensors to restore after a restart; called on all ranks.

        Rank 0's are saved. Of a DTensor every rank's block is, and all ranks have to return it.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what rank 0's `state_dict` returned when the checkpoint was saved; tensors come whole, on the CPU."""


def load_hook(path: str, kwargs: dict[str, object]) -> Hook:
    """The hook that the class or function at a dotted path makes of `kwargs`.

    Raises InputError if `path` does not take `kwargs`, or does not return a hook.
    """
    hook = find_hook(path, kwargs)(**kwargs)
    if not isinstance(hook, Hook):
        raise InputError(f"general.hooks: {path} made a {type(hook).__name__}, expected a kenotron.Hook")
    return hook


def find_hook(path: str, kwargs: dict[str, object]) -> Callable[..., Any]:
    """The class or function at a dotted path, not called yet. Raises as `load_hook`, as far as they show by then."""
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
        given = f"kwargs {kwargs}" if kwargs else "no kwargs"
        raise InputError(f"general.hooks: {path} cannot be called with {given}: {error}") from None
    except ValueError:  # a function in C that does not show its arguments
        pass
    return make
