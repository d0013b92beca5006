"""Choose where a run starts: at step 0, at its own newest checkpoint, or at one that the config names (`restart.py`).

The rules are functions of a config and a folder, for one process; `Checkpoints.start` finds the newest checkpoint.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from kenotron.checkpoint import folders, manifest
from kenotron.checkpoint.model_files import find_model, is_hub_name
from kenotron.config import Config, fill_run_name, same_run_difference
from kenotron.config.checkpoints import LOAD_MODES
from kenotron.config.errors import InputError, naming
from kenotron.config.model import ExistingCheckpointInit
from kenotron.config.resolved import read_resolved
from kenotron.config.runs import edited_stages, same_batch_overrides
from kenotron.optim.schedule import learning_rate

logger = logging.getLogger("kenotron")


@dataclass(frozen=True)
class Start:
    """Where a run begins: at step 0 (path None), or after `step` steps with what it `loads` of the checkpoint `path`.

    `continues`: the checkpoint belongs to this run; otherwise a new run starts from another run's. Schedule and data
    begin after the steps `schedule_start` and `data_start`, which are 0 unless the run is a restart. `durable_step`:
    the step of `path`, or for a local checkpoint, of the newest one in `checkpoints_path` before it. `held_out`:
    `RunData.held_out_hashes` of `path`, or of the checkpoint whose weights a run at step 0 takes. `name`: the run's
    name, set by `Checkpoints.start`.
    """

    path: Path | None = None
    continues: bool = False
    step: int = 0
    loads: frozenset[str] = frozenset()
    schedule_start: int = 0
    data_start: int = 0
    durable_step: int = 0
    held_out: tuple[str, ...] = ()
    name: str = ""

    @classmethod
    def at(cls, path: Path, continues: bool) -> Self:
        """Return the start with which the checkpoint `path` continues its own run."""
        saved = manifest.read_manifest(path)
        defaults = {"schedule_start": 0, "data_start": 0, "durable_step": saved.step, "held_out": ()}
        starts = {name: saved.state.get(name, default) for name, default in defaults.items()}
        return cls(path, continues, saved.step, frozenset(LOAD_MODES["continue"]), **starts)

    @classmethod
    def new(cls, config: Config) -> Self:
        """Return a start at step 0. Data that validated the model of `model.init_method.path` stay held out."""
        init = config.model.init_method
        if not isinstance(init, ExistingCheckpointInit) or is_hub_name(init.path):  # do not access the hub
            return cls()
        with naming("model.init_method.path"):
            weights = find_model(init.path)
        return cls(held_out=cls.at(weights.folder, continues=False).held_out if weights.ours else ())

    def end(self, config: Config) -> int:
        """Return the last step, at which the schedule reaches `tokens.train_steps`."""
        return self.schedule_start + config.tokens.train_steps

    def done(self, config: Config) -> bool:
        """Return whether the checkpoint already has all steps of the run that continues it."""
        return self.continues and self.step >= self.end(config)

    def in_run_steps(self, config: Config) -> Config:
        """Return `config` with stages in steps of the run; data that continue from before begin at negative steps."""
        stages = [
            stage.model_copy(update={"start_training_step": stage.start_training_step + self.data_start})
            for stage in config.data_stages
        ]
        tokens = config.tokens.model_copy(update={"train_steps": self.end(config)})
        return config.model_copy(update={"data_stages": stages, "tokens": tokens})


HIGHER_RATE = 1.1  # a learning rate that rises by a smaller factor at a resume is not logged
StartElsewhere = Callable[[Config, Path], Start]
"""Returns the start of a new run of a config at another run's checkpoint (`restart.py`)."""


def refuse_unusable(root: Path) -> None:
    """Raise InputError if the folder has only damaged or nanotron checkpoints, which a new run would replace."""
    if any(root.glob(f"*/{folders.NANOTRON_METADATA}")):
        raise InputError(
            f"checkpoints.checkpoints_path: {root} holds checkpoints of nanotron, which no run continues; convert them "
            "(`kenotron convert from-nanotron`), set another path, or start at step 0 with --fresh, which keeps them"
        )
    if any(_has_manifest(entry.path) for entry in folders.list_checkpoints(root)):
        raise InputError(
            f"checkpoints.checkpoints_path: no checkpoint in {root} is intact, as warned above; restore one, set "
            "another path, or start at step 0 with --fresh, which keeps them"
        )


def _has_manifest(path: Path) -> bool:
    """Return whether the folder is a checkpoint, intact or not; True if that cannot be read."""
    try:
        return manifest.MANIFEST in os.listdir(path)
    except OSError:
        return True


def run_name(config: Config, continued: Path | None) -> str:
    """Return the run's name in the checkpoint `continued`; for a new run, `general.run` with %date and %jobid."""
    if continued is not None:
        return read_resolved(continued / "config.yaml").general.run
    return fill_run_name(config, datetime.now(), os.environ.get("SLURM_JOB_ID")).general.run


def with_run_name(config: Config, name: str) -> Config:
    """Return `config` with `general.run` replaced by `name`."""
    return config.model_copy(update={"general": config.general.model_copy(update={"run": name})})


# ---- the run's own checkpoint --------------------------------------------------------------------------------


def start_of_run(config: Config, newest: Path | None, start_elsewhere: StartElsewhere | None = None) -> Start:
    """Return the start of a run of `config` whose newest checkpoint is `newest`. One process calls it.

    Raises InputError if the checkpoint belongs to a run that this config does not continue.
    """
    if newest is not None:
        start = Start.at(newest, continues=True)
        before = read_resolved(newest / "config.yaml")
        check_batch(before, config, newest)
        _check_same_run(before, config, newest, start.step - start.data_start)
        warn_of_higher_rate(config, before, start, newest)
        return start
    named = config.resume_folder
    if named is None:
        return Start.new(config)
    with naming("checkpoints.resume_checkpoint_path"):
        if start_elsewhere is None:
            raise InputError("Checkpoints needs start_elsewhere for it; kenotron.train has it")
        found = folders.resolve(named)
    return start_elsewhere(config, found)


def _check_same_run(before: Config, config: Config, path: Path, step: int) -> None:
    """Raise InputError if `config` does not continue the run of the checkpoint `path`; log what it changes.

    `before` is that run's config; `step` counts as in its data stages.
    """
    if (difference := same_run_difference(before, config, step)) is not None:
        key, old, new = difference
        if key.startswith("data_stages."):
            raise InputError(
                f"{changed_stage(before, path, step, difference)}, start over with --fresh, or set another "
                f"checkpoints.checkpoints_path"
            )
        anneal = "`kenotron branch` (another decay from a checkpoint), " if "learning_rate_scheduler" in key else ""
        raise InputError(
            f"{path} belongs to another run: {key} is {old!r} there and {new!r} in this config; put the old value "
            f"back, {anneal}start over with --fresh, or set another checkpoints.checkpoints_path"
        )
    if edited := edited_stages(before, config, step):
        names = ", ".join(f"'{name}'" for name in edited)
        logger.warning("data_stages: from step %d on these stages differ from %s: %s", step + 1, path, names)
    name = before.general.run
    pattern = re.escape(config.general.run).replace("%date", r"\d{8}_\d{6}").replace("%jobid", r"\w+")
    if not re.fullmatch(pattern, name):
        logger.warning("general.run: a run that continues keeps its name: %s, not %s", name, config.general.run)


def continued_run(config: Config, roots: Iterable[Path]) -> Config | None:
    """Return the config of the run in the first folder of `roots` with checkpoints; None if there is none.

    Only the config is read. Raises InputError if `config` has another global batch.
    """
    for root in roots:
        try:
            checkpoint = folders.resolve(root)
            before = read_resolved(checkpoint / "config.yaml")
        except InputError:
            continue  # no run yet, or an unreadable one, which a start reports
        check_batch(before, config, checkpoint)
        return before
    return None


def check_batch(before: Config, config: Config, path: Path) -> None:
    """Raise InputError, with the overrides that keep it, if the global batch differs from the checkpoint `path`'s.

    The overrides are not applied silently: a YAML's micro-batches mean the same on one process and on a thousand.
    """
    old, new = before.global_batch_size, config.global_batch_size
    if old == new:
        return
    tokens, dp = config.tokens, config.parallelism.dp
    raise InputError(
        f"{path} has a global batch of {old} sequences, this config has {new} (micro_batch_size "
        f"{tokens.micro_batch_size} x batch_accumulation_per_replica {tokens.batch_accumulation_per_replica} x dp "
        f"{dp}); to keep it, add {' '.join(same_batch_overrides(before, dp))}; to change it, start over with --fresh, "
        f"or set another checkpoints.checkpoints_path"
    )


def warn_of_higher_rate(config: Config, before: Config, start: Start, path: Path) -> None:
    """Log that the learning rate rises at the first step, which it would not have done in the run of `path`.

    `before` is that run's config. The reason is more `tokens.train_steps` after a decay, or another peak rate.
    """
    saved = Start.at(path, continues=False)
    done, steps = saved.step - saved.schedule_start, config.tokens.train_steps
    if done < 1 or start.step >= start.end(config):
        return
    old, new = before.optimizer.learning_rate_scheduler, config.optimizer.learning_rate_scheduler
    had, planned = (learning_rate(old, step, before.tokens.train_steps) for step in (done, done + 1))
    gets = learning_rate(new, start.step + 1 - start.schedule_start, steps)
    if gets <= HIGHER_RATE * max(had, planned):
        return
    falls = f"kenotron branch FILE --at {saved.step} --cooldown {start.end(config) - start.step} --name NAME"
    logger.warning(
        "learning rate of step %d: %.3g (step %d had %.3g); the decay now ends at step %d%s",
        start.step + 1,
        gets,
        saved.step,
        had,
        start.schedule_start + new.decay_start + new.decay_steps(steps),
        f". For a rate that falls from there: {falls}" if had else "",
    )


def changed_stage(before: Config, path: Path, step: int, difference: tuple[str, Any, Any]) -> str:
    """Return the message about a stage that has begun but differs in this config."""
    key, old, new = difference
    if key.endswith("start_training_step"):
        where = "in the run and not" if old else "not in the run but"
        what = f"{key}: a stage begins at step {old or new} {where} in this config"
    else:
        name = before.data_stages[int(key.split(".")[1])].name
        what = f"{key} of stage '{name}' is {old!r} there and {new!r} in this config"
    return (
        f"{path} is at step {step}, and stages that have begun by then may not change: {what}; put that back "
        f"(stages that begin later may be edited)"
    )
