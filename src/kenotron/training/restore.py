"""Load a checkpoint into a run that has been built: weights, optimizer, step, and state of streams and hooks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kenotron.checkpoint.loading import read_data
from kenotron.config.errors import InputError
from kenotron.models import named_parameters
from kenotron.optim.state import init_state, load_numbers, state_tensors
from kenotron.parallel.ranks import raise_on_any_rank, run_on_rank0
from kenotron.training.console import logger
from kenotron.training.saved_state import load_hook_states, model_tensors, optimizer_tensors

if TYPE_CHECKING:
    from kenotron.checkpoint.start import Start
    from kenotron.training.run import Run

NAMES = {"model": "weights", "optimizer": "optimizer", "data": "data position", "scheduler": "schedule", "step": "step"}


def restore(run: Run, start: Start) -> None:
    """Load the parts of the checkpoint in `start.loads` into `run`; all ranks call it, and each reads its own blocks.

    Raises InputError if a file is damaged, or if the run's tokenizer differs from the checkpoint's.
    """
    if start.path is None:
        return
    moments = None
    if "optimizer" in start.loads and (start.path / "optimizer").is_dir():
        init_state(run.optimizer)
        moments = state_tensors(named_parameters(*run.parts), run.optimizer)
    path = start.path
    optimizer = None if moments is None else optimizer_tensors(moments, run.parts)
    loaded = run.checkpoints.load(start, model_tensors(*run.parts), optimizer)
    run_on_rank0(lambda: _check_data(run, loaded.state.get("data", {}), start))
    if moments is not None:
        load_numbers(named_parameters(*run.parts), run.optimizer, moments)
    if run.pipeline is not None:
        run.pipeline.share_tied_weights()
    run.step = start.step
    if "data" in start.loads and run.data.streams:
        raise_on_any_rank(lambda: run.data.streams.restore(run.step, partial(read_data, path)))
    if "step" in start.loads:
        load_hook_states(run.hooks, loaded.state.get("hooks", {}), loaded.hooks)  # an imported checkpoint has none
    names = [name for part, name in NAMES.items() if part in start.loads and (part, moments) != ("optimizer", None)]
    logger.info("Loaded %s of %s (step %d)", ", ".join(names), start.path, loaded.step)


def _check_data(run: Run, saved: dict[str, str], start: Start) -> None:
    """Raise for a different tokenizer, whose token ids mean different text; log a warning for changed data."""
    current = run.data.fingerprints()
    for name in sorted(saved.keys() & current.keys()):
        if current[name] in saved.values() or (name != "tokenizer" and "data" not in start.loads):
            continue
        if name == "tokenizer" and start.continues:
            assert run.tokenizer is not None
            raise InputError(
                f"tokenizer: {run.tokenizer.name} (hash {current[name]}) is not the tokenizer of {start.path} (hash "
                f"{saved[name]}), which is in {start.path}/tokenizer; put that one back, or start over with --fresh"
            )
        logger.warning("%s has changed since %s was saved: the run continues with the new content", name, start.path)
