"""What a run says of itself before the first step and after the last."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.parallel import device as devices
from kenotron.train import console
from kenotron.train.console import human_format, log_folder, logger

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.train.run import Run
    from kenotron.train.saving import Start


def first_line(config: Config) -> None:
    """Which program, and for which project."""
    import kenotron

    logger.info("kenotron %s | project: %s", kenotron.__version__, config.general.project)


def training_plan(run: Run) -> None:
    """Stages, sizes, where things are: the seeds' lines."""
    for stage in run.data.stages:
        done = min(max(run.step - stage.start + 1, 0), stage.steps)
        logger.info(
            "[Training Plan] Stage %s has %d remaining training steps and has consumed %d samples",
            stage.name,
            stage.steps - done,
            done * run.config.global_batch_size,
        )
    for line in run.data.describe():
        logger.info("%s", line)
    logger.info("[Training Plan] There are %d training stages", len(run.data.stages))
    for stage in run.data.stages:
        logger.info("[Stage %s] start from step %d", stage.name, stage.start)
    tokens = run.config.tokens
    logger.info(
        "[Start training] datetime: %s | mbs: %d | grad_accum: %d | global_batch_size: %d | sequence_length: %d | "
        "train_steps: %d | start_iteration_step: %d | consumed_train_samples: %d",
        datetime.now(),
        tokens.micro_batch_size,
        tokens.batch_accumulation_per_replica,
        run.config.global_batch_size,
        tokens.sequence_length,
        tokens.train_steps,
        run.step,
        run.step * run.config.global_batch_size,
    )
    logger.info("%s", console.show_memory(devices.memory(run.device)))


def already_finished(config: Config, start: Start) -> None:
    logger.info(
        "This run is finished: %s has all %d steps. Raise tokens.train_steps to go on, or start over with --fresh.",
        start.path,
        config.tokens.train_steps,
    )


def farewell(run: Run) -> None:
    """Where everything is, and what to do next."""
    checkpoint = Path(run.config.checkpoints.checkpoints_path) / str(run.step)
    state = f"stopped ({run.stop_reason})" if run.stop_reason else "finished"
    logger.info(
        "Run %s at step %d of %d, %s tokens. Logs: %s",
        state,
        run.step,
        run.config.tokens.train_steps,
        human_format(run.consumed_tokens),
        log_folder(run.config),
    )
    if not checkpoint.exists():
        return
    logger.info(
        "Checkpoint: %s. Next:\n"
        '  kenotron generate %s --prompt "def main(" --max-new-tokens 64\n'
        "  kenotron convert to-hf %s %s-hf\n"
        "  tensorboard --logdir %s",
        checkpoint,
        checkpoint,
        checkpoint,
        checkpoint,
        run.config.logging.log_dir,
    )
