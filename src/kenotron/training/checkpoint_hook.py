"""The hook that saves a run: when, what, and what comes after a save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kenotron.checkpoint.engine import Keep, Saved, Unsaved
from kenotron.config import dump
from kenotron.config.dotted import FOUND, import_dotted
from kenotron.config.errors import CheckpointError, PeerFailed, RunFailed
from kenotron.config.resolved import CODE
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
    from pathlib import Path

    from kenotron.checkpoint.local import LocalTier
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

STEP, SAMPLES = 10**18 + 7, 10**18 + 9  # stand for the counters in the text of a config
TEXT_FILES = "kenotron.checkpoint.model_files.text_files_of"
Outcomes = list[Saved | Unsaved]


class CheckpointHook(Hook):
    """Saves every `checkpoint_interval` steps, at the end, and when the run is stopped, through the run's engine.

    With `checkpoints.local` also every `local.interval` steps, in the folder of `run.local`.
    """

    priority = -50

    def __init__(self) -> None:
        self.saved_step: int | None = None
        self.last_step_skipped = False
        self.durable_step = 0  # of the newest checkpoint in checkpoints_path
        self.problem: str | None = None  # why the last save there failed

    def on_train_start(self, run: Run) -> None:
        """Save the initial state, if the config asks for it."""
        self.durable_step = run.start.durable_step if run.start.continues else 0
        if run.step > 0:
            self.saved_step = self.durable_step if run.start.continues else run.step
        elif run.config.checkpoints.save_initial_state:
            self._save(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Save every `checkpoint_interval` steps; between them, see what has become of a save in the background."""
        self.last_step_skipped = result.skipped
        if run.step % run.config.checkpoints.checkpoint_interval == 0:
            self._save(run)
            return
        if run.engine.in_flight and not any_rank(not run.engine.settled(), run.mesh.world_size, run.device):
            self._announce(run, run.engine.collect())
        if run.local is not None and run.config.checkpoints.saves_at(run.step) and not run.finished:
            self._save_local(run, run.local)

    def on_train_end(self, run: Run) -> None:
        """Save the final state, or where the run was stopped, unless that step is saved; wait until it is complete."""
        at_the_end = run.config.checkpoints.save_final_state or run.stop_reason is not None
        if at_the_end and self.saved_step != run.step:
            self._save(run)
        self._announce(run, run.engine.collect())
        if self.problem is not None:
            raise RunFailed(f"step {self.saved_step}: {self.problem}; earlier checkpoints are as they were")
        if run.local is not None:
            run.local.close()

    def on_error(self, run: Run, error: Exception) -> None:
        """Complete a save in the background: nothing of it depends on what failed."""
        self._announce(run, run.engine.finish_alone(comes_from_another_rank(error)), alone=True)

    def _save(self, run: Run) -> None:
        self._announce(run, run.engine.collect())
        # After a skipped step nothing is pruned: the last good weights may be those of the oldest checkpoint.
        settings, keep = run.config.checkpoints, None
        if settings.keep_last is not None and not self.last_step_skipped:
            keep = Keep(settings.keep_last, settings.keep_every, frozenset(run.protected_steps))
        outcomes = save(run, keep)
        self.saved_step = run.step
        self._announce(run, outcomes)

    def _save_local(self, run: Run, local: LocalTier) -> None:
        """Save locally, unless an earlier save is still in flight; training continues if it fails."""
        if run.engine.in_flight:
            logger.info("No local checkpoint of step %d: the last save is still in flight", run.step)
            return
        try:
            self._announce(run, save(run, None, local.root, local.state(self.durable_step)))
        except (RunFailed, PeerFailed) as error:
            logger.warning("%s", error)

    def _announce(self, run: Run, outcomes: Outcomes, alone: bool = False) -> None:
        """Log what has become of saves; after one in checkpoints_path remove local ones, and call `on_save`.

        `alone`: other ranks do not call it.
        """
        for outcome in outcomes:
            is_local = _is_local(run, outcome)
            _log(run, outcome, is_local)
            if isinstance(outcome, Unsaved):
                self.problem = self.problem if is_local else outcome.problem
                continue
            step = int(outcome.path.name)
            if is_local:
                if run.local is not None and not alone:
                    run.local.saved(step)
                continue
            self.durable_step, self.problem = step, None
            if run.local is not None:
                run.local.remove()
            for hook in () if alone else run.hooks:
                hook.on_save(run, outcome.path)


def save(
    run: Run, keep: Keep | None = None, root: Path | None = None, more_state: dict[str, Any] | None = None
) -> Outcomes:
    """Save the current step with the run's engine; returns what is complete by now. `keep`: prune the others then.

    `root` is the folder (None: that of checkpoints_path), `more_state` more of what the manifest says of the run.
    Raises RunFailed if it cannot be written, or does not read back as it was written.
    """
    root = root or run.config.checkpoint_folder
    if run.mesh.is_first:
        run_log(run.config).saving(root / str(run.step))
    for module in run.roots:
        data_parallel.reshard_params(module)
    # Before its first update an optimizer has no state, and a new one is the same thing.
    moments = state_tensors(named_parameters(*run.parts), run.optimizer) if run.optimizer.state else None
    hooks, tensors = hook_states(run)
    content: dict[str, Any] = {
        "model": model_tensors(*run.parts, copy_buffers=run.engine.in_background),
        "optimizer": None if moments is None else optimizer_tensors(moments, run.parts),
        "hooks": tensors if any_rank(bool(tensors), run.mesh.world_size, run.device) else None,
        "state": manifest_state(run) | {"hooks": hooks} | (more_state or {}),
        "config_yaml": _config_text(run),
        "model_config": run.config.model.architecture.model_dump(mode="json", by_alias=True),
        "save_tokenizer": import_dotted(TEXT_FILES, "checkpoints")(run.config, run.tokenizer),
        "data": run.data.streams.states(run.step) if run.data.streams else None,
    }
    try:
        return run.engine.save(root, run.step, content, keep)
    except CheckpointError as error:
        raise RunFailed(f"step {run.step}: {error}; earlier checkpoints are as they were") from error


def _log(run: Run, outcome: Saved | Unsaved, is_local: bool) -> None:
    if isinstance(outcome, Unsaved):
        log = logger.warning if is_local else logger.error
        log("Checkpoint %s was not saved: %s; earlier ones are as they were", *vars(outcome).values())
        return
    waited = "" if outcome.waited is None else f", of which training waited {outcome.waited:.2f} s"
    size = console.mebibytes(outcome.bytes)
    logger.info("Saved checkpoint at %s: %s in %.2f s%s", outcome.path, size, outcome.seconds, waited)
    if run.engine.verifies:
        logger.info("Read back %s: all checksums match", outcome.path)
    for note in outcome.notes:
        logger.warning("%s", note)


def _is_local(run: Run, outcome: Saved | Unsaved) -> bool:
    return outcome.path.parent != run.config.checkpoint_folder


def _config_text(run: Run) -> str:
    """The config with the counters of the current step, as nanotron saves it."""
    if run.config_text is None or run.config_text[0] is not run.config:  # 5 ms, in which training would wait
        marks = {"step": STEP, "consumed_train_samples": SAMPLES}
        marked = run.config.model_copy(update={"general": run.config.general.model_copy(update=marks)})
        code = "".join(f"{CODE} {name} from {file}\n" for name, file in sorted(FOUND.items()))
        run.config_text = run.config, dump(marked) + code
    return run.config_text[1].replace(str(STEP), str(run.step)).replace(str(SAMPLES), str(run.consumed_samples))
