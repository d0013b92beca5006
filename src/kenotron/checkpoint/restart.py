"""Start a new run at another run's checkpoint: `resume_checkpoint_path` and `load_mode`.

For a checkpoint after step 6000 of 10,000, a new run of 500 steps does this:

    load_mode          model  optimizer  data  scheduler  step   its steps    first sample  first rate
    model_only         x                                         1-500        1st           schedule(1)
    model_opt_data     x      x          x                       1-500        6001st step's schedule(1)
    cooldown           x      x          x                x      6001-6500    6001st step's schedule(1)

The first step, and the steps after which schedule and data begin, are three numbers (`Start`). The run's own
checkpoints hold them, so it resumes like any other.
"""

from dataclasses import replace
from pathlib import Path

from kenotron.checkpoint import manifest
from kenotron.checkpoint.start import Start, changed_stage, logger, warn_of_higher_rate
from kenotron.config import Config
from kenotron.config.errors import InputError
from kenotron.config.resolved import read_resolved
from kenotron.config.runs import past_stage_difference
from kenotron.config.weight_settings import changed_settings
from kenotron.config.writing import ABSENT, diff
from kenotron.data.stage_plan import plan_stages

KEY = "checkpoints.resume_checkpoint_path"
WITHOUT = "set a checkpoints.load_mode without it, such as model_only"


def start_elsewhere(config: Config, path: Path) -> Start:
    """Return the start of a new run of `config` at the checkpoint `path`; log hyper-parameters that differ from it.

    Warns of settings of the model that `config` changes although the weights were trained with them.

    Raises InputError like `place_elsewhere`, or if the optimizer's state is missing or of another optimizer.
    """
    start = place_elsewhere(config, path)
    if (path / "config.yaml").exists():
        before = read_resolved(path / "config.yaml")
        if "model" in start.loads:
            for line in changed_settings(before.model.decoder, config.model.decoder, path):
                logger.warning(line)
        if "optimizer" in start.loads:
            _check_optimizer(config, before, start, path)
        if "scheduler" in start.loads or start.loads >= {"data", "step"}:
            warn_of_higher_rate(config, before, start, path)
    return start


def place_elsewhere(config: Config, path: Path) -> Start:
    """Return the start of a new run of `config` at the checkpoint `path` in steps and data, without logging.

    Raises InputError if no step is left, or if the data should continue but the steps so far had other data.
    """
    start = _start(config, path)
    if start.step >= start.end(config):
        raise InputError(
            f"{KEY}: {path} is at step {start.step} and tokens.train_steps is {config.tokens.train_steps}, so no step "
            f"is left; raise tokens.train_steps, or start at step 0 (checkpoints.load_mode: transfer)"
        )
    if (path / "config.yaml").exists() and "data" in start.loads:
        _check_data_position(config, read_resolved(path / "config.yaml"), start, path)
    return start


def _start(config: Config, path: Path) -> Start:
    there, loads = Start.at(path, continues=False), config.checkpoints.loads
    step = there.step if "step" in loads else 0
    moved = step - there.step
    return replace(
        there,
        step=step,
        loads=loads,
        schedule_start=there.schedule_start + moved if "scheduler" in loads else step,
        data_start=there.data_start + moved if "data" in loads else step,
    )


def _check_data_position(config: Config, before: Config, start: Start, path: Path) -> None:
    """Raise InputError unless the steps so far had the samples that they have with `config`."""
    step = start.step - start.data_start
    anew = "or restart the data (checkpoints.load_mode: transfer)"
    if (difference := past_stage_difference(before, config, step)) is not None:
        raise InputError(f"{KEY}: {changed_stage(before, path, step, difference)}, {anew}")
    consumed = manifest.read_manifest(path).state.get("consumed_train_samples", 0)
    now = sum(stage.samples_before(start.step + 1) for stage in plan_stages(start.in_run_steps(config)))
    if consumed != now:
        raise InputError(
            f"{KEY}: {path} has consumed {consumed} samples in {step} steps, but this config's global batch of "
            f"{config.global_batch_size} makes that {now}; keep the global batch size and its ramps, {anew}"
        )


def _check_optimizer(config: Config, before: Config, start: Start, path: Path) -> None:
    """Log the optimizer settings that the config changes from the first step on.

    Raises InputError if the optimizer is another one, or its state is missing. There is no state before the first step,
    as in an imported model, or of SGD without momentum.
    """
    schedule = "optimizer.learning_rate_scheduler."
    saved, factory = manifest.read_manifest(path), before.optimizer.optimizer_factory
    if not saved.below("optimizer"):
        if saved.step > 0 and getattr(factory, "momentum", None) != 0:
            raise InputError(f"{KEY}: {path} has no optimizer state; {WITHOUT}")
        return
    changed = [
        (name.removeprefix("optimizer."), old, new)
        for name, old, new in diff(before, config)
        if name.startswith("optimizer.")
        and not name.endswith("zero_stage")
        and ("scheduler" in start.loads or not name.startswith(schedule) or name == f"{schedule}learning_rate")
    ]
    several = max(len(each.optimizer.factories) for each in (before, config)) > 1
    for name, old, new in changed:
        of_another = name.endswith("optimizer_factory.name") or (
            several and name.endswith(".pattern") and old != ABSENT
        )
        if of_another or (name == "ema_decay" and old is None):
            raise InputError(f"{KEY}: optimizer.{name} is {old} in {path} and {new} in this config; {WITHOUT}")
    if changed:
        logger.info(
            "Resumed with %s", ", ".join(f"{name} {new} (the checkpoint had {old})" for name, old, new in changed)
        )
