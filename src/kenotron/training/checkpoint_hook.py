"""The hook that saves a run: when, what comes after a save, and which checkpoints are kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kenotron import checkpoint
from kenotron.config import Config, dump
from kenotron.config.errors import RunFailed
from kenotron.models import named_parameters
from kenotron.optim.state import state_tensors
from kenotron.parallel import data as data_parallel
from kenotron.parallel.ranks import run_on_rank0
from kenotron.training import console
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.report import run_log
from kenotron.training.saved_state import manifest_state, model_tensors, optimizer_tensors

if TYPE_CHECKING:
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult


class CheckpointHook(Hook):
    """Saves every `checkpoint_interval` steps, at the end, and when the run is stopped; prunes after each save."""

    priority = -50

    def __init__(self) -> None:
        self.saved_step: int | None = None
        self.last_step_skipped = False

    def on_train_start(self, run: Run) -> None:
        """Save the initial state, if the config asks for it."""
        if run.step > 0:
            self.saved_step = run.step
        elif run.config.checkpoints.save_initial_state:
            self._save(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Save every `checkpoint_interval` steps."""
        self.last_step_skipped = result.skipped
        if run.step % run.config.checkpoints.checkpoint_interval == 0:
            self._save(run)

    def on_train_end(self, run: Run) -> None:
        """Save the final state, or where the run was stopped, unless that step is saved already."""
        at_the_end = run.config.checkpoints.save_final_state or run.stop_reason is not None
        if at_the_end and self.saved_step != run.step:
            self._save(run)

    def _save(self, run: Run) -> None:
        path = save(run)
        self.saved_step = run.step
        for hook in run.hooks:
            hook.on_save(run, path)
        if not self.last_step_skipped:  # else the last good weights may be those of the oldest checkpoint
            _prune(run)


def save(run: Run) -> Path:
    """Write the checkpoint of the current step and verify it; returns its folder.

    Raises RunFailed if it cannot be written, or does not read back as it was written.
    """
    root = run.config.checkpoint_folder
    if run.mesh.is_first:
        run_log(run.config).saving(root / str(run.step))
    for module in run.roots:
        data_parallel.reshard_params(module)
    # Before its first update an optimizer has no state, and a new one is the same thing.
    moments = state_tensors(named_parameters(*run.parts), run.optimizer) if run.optimizer.state else None
    try:
        saved = checkpoint.save(
            root,
            run.step,
            model=model_tensors(*run.parts),
            optimizer=None if moments is None else optimizer_tensors(moments, run.parts),
            state=manifest_state(run),
            config_yaml=dump(_config_at(run)),
            model_config=run.config.model.architecture.model_dump(mode="json", by_alias=True),
            save_tokenizer=run.tokenizer.save if run.tokenizer is not None else None,
            data=run.data.streams.states(run.step) if run.data.streams else None,
        )
    except checkpoint.CheckpointError as error:
        raise RunFailed(f"step {run.step}: {error}; earlier checkpoints are as they were") from error
    logger.info("Saved checkpoint at %s: %s in %.2f s", saved.path, console.mebibytes(saved.bytes), saved.seconds)
    if not run.config.general.ignore_sanity_checks:
        _read_back(run, saved.path)
    return saved.path


def _read_back(run: Run, path: Path) -> None:
    """Verify the checkpoint while the earlier ones still exist. Each rank reads a share of its files."""
    problems = checkpoint.verify_together(path)
    if problems:
        raise RunFailed(f"step {run.step}: {'; '.join(problems)}; earlier checkpoints are as they were")
    logger.info("Read back %s: all checksums match", path)


def _config_at(run: Run) -> Config:
    """The config with the counters of the current step, as nanotron saves it."""
    counters = {"step": run.step, "consumed_train_samples": run.consumed_samples}
    return run.config.model_copy(update={"general": run.config.general.model_copy(update=counters)})


def _prune(run: Run) -> None:
    settings = run.config.checkpoints
    root, keep_last, keep_every = run.config.checkpoint_folder, settings.keep_last, settings.keep_every
    if keep_last is not None:
        run_on_rank0(lambda: checkpoint.prune(root, keep_last, keep_every, run.protected_steps))
