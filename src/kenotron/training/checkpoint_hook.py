"""The hook that saves checkpoints: at which steps, with which content, and what follows a save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kenotron.checkpoint.checkpoints import Outcomes, Saved, Unsaved
from kenotron.checkpoint.text_files import text_files_of
from kenotron.config.errors import CheckpointError, PeerFailed, RunFailed
from kenotron.models import named_parameters
from kenotron.optim.state import state_tensors
from kenotron.parallel import data as data_parallel
from kenotron.parallel.collectives import any_rank
from kenotron.parallel.ranks import comes_from_another_rank
from kenotron.training import console
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.report import run_log
from kenotron.training.saved_state import hook_states, manifest_state, model_tensors, optimizer_tensors

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class CheckpointHook(Hook):
    """Saves every `checkpoint_interval` steps, at the end, and when the run is stopped.

    With `checkpoints.local` also every `local.interval` steps, on the machines' own disks.
    """

    priority = -50

    def __init__(self) -> None:
        self.saved_step: int | None = None
        self.last_step_skipped = False

    def on_train_start(self, run: Run) -> None:
        """Save the initial state, if the config asks for it."""
        if run.step > 0:
            self.saved_step = run.checkpoints.durable_step if run.start.continues else run.step
        elif run.config.checkpoints.save_initial_state:
            self._save(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Save every `checkpoint_interval` steps; at other steps, check on a save in the background."""
        self.last_step_skipped = result.skipped
        settings = run.config.checkpoints
        if run.step % settings.checkpoint_interval == 0:
            self._save(run)
            return
        _announce(run, run.checkpoints.poll(run.device))
        if settings.local is not None and settings.saves_at(run.step) and not run.finished:
            self._save_local(run)

    def on_train_end(self, run: Run) -> None:
        """Save the last step, unless it is saved, if the config asks or the run was stopped; wait for all saves."""
        save_last = run.config.checkpoints.save_final_state or run.stop_reason is not None
        if save_last and self.saved_step != run.step:
            self._save(run)
        _announce(run, run.checkpoints.collect())
        if (problem := run.checkpoints.problem) is not None:
            raise RunFailed(f"step {self.saved_step}: {problem}; earlier checkpoints are as they were")
        run.checkpoints.end()

    def on_error(self, run: Run, error: Exception) -> None:
        """Complete a save in the background, which does not depend on the failed step."""
        _announce(run, run.checkpoints.finish_alone(comes_from_another_rank(error)), alone=True)

    def _save(self, run: Run) -> None:
        _announce(run, run.checkpoints.collect())
        # After a skipped step nothing is pruned: the oldest checkpoint may hold the last good weights.
        outcomes = save(run, keep_all=self.last_step_skipped)
        self.saved_step = run.step
        _announce(run, outcomes)

    def _save_local(self, run: Run) -> None:
        """Save locally, unless an earlier save is still in flight; training continues if it fails."""
        if run.checkpoints.engine.in_flight:
            logger.info("No local checkpoint of step %d: the last save is still in flight", run.step)
            return
        try:
            _announce(run, save(run, local=True))
        except (RunFailed, PeerFailed) as error:
            logger.warning("%s", error)


def save(run: Run, *, local: bool = False, keep_all: bool = False) -> Outcomes:
    """Save the current step, and return the outcomes of saves that are complete. `keep_all`: prune no checkpoint.

    Raises RunFailed if the checkpoint cannot be written, or reads back differently.
    """
    checkpoints = run.checkpoints
    if run.mesh.is_first:
        root = checkpoints.local.root if local and checkpoints.local else checkpoints.root
        run_log(run.config).saving(root / str(run.step))
    for module in run.roots:
        data_parallel.reshard_params(module)
    try:
        if local:
            return checkpoints.save_local(run.step, content_of(run))
        return checkpoints.save(run.step, content_of(run), keep_all)
    except CheckpointError as error:
        raise RunFailed(f"step {run.step}: {error}; earlier checkpoints are as they were") from error


def content_of(run: Run) -> dict[str, Any]:
    """Return the content of a checkpoint of `run`: the keyword arguments of `checkpoint.saving.save`."""
    # Before its first update an optimizer has no state, and equals a new one.
    moments = state_tensors(named_parameters(*run.parts), run.optimizer) if run.optimizer.state else None
    hooks, tensors = hook_states(run)
    return {
        "model": model_tensors(*run.parts, copy_buffers=run.checkpoints.engine.in_background),
        "optimizer": None if moments is None else optimizer_tensors(moments, run.parts),
        "hooks": tensors if any_rank(bool(tensors), run.mesh.world_size, run.device) else None,
        "state": manifest_state(run) | {"hooks": hooks},
        "config_yaml": run.checkpoints.config_text(run.config, run.step, run.consumed_samples),
        "model_config": run.config.model.architecture.model_dump(mode="json", by_alias=True),
        "save_tokenizer": text_files_of(run.config, run.tokenizer),
        "data": run.data.streams.states(run.step) if run.data.streams else None,
    }


def _announce(run: Run, outcomes: Outcomes, alone: bool = False) -> None:
    """Log outcomes of saves; call `on_save` for those in checkpoints_path, unless other ranks do not (`alone`)."""
    for outcome in outcomes:
        is_local = run.checkpoints.is_local(outcome)
        _log(run, outcome, is_local)
        if isinstance(outcome, Saved) and not is_local and not alone:
            for hook in run.hooks:
                hook.on_save(run, outcome.path)


def _log(run: Run, outcome: Saved | Unsaved, is_local: bool) -> None:
    if isinstance(outcome, Unsaved):
        log = logger.warning if is_local else logger.error
        log("Checkpoint %s was not saved: %s; earlier ones are as they were", *vars(outcome).values())
        return
    waited = "" if outcome.waited is None else f", of which training waited {outcome.waited:.2f} s"
    size = console.mebibytes(outcome.bytes)
    logger.info("Saved checkpoint at %s: %s in %.2f s%s", outcome.path, size, outcome.seconds, waited)
    if run.checkpoints.engine.verifies:
        logger.info("Read back %s: all checksums match", outcome.path)
    for note in outcome.notes:
        logger.warning("%s", note)
