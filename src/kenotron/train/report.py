"""What a run says of itself before the first step and after the last."""

from __future__ import annotations

import shlex
import shutil
import sys
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
    logger.info("project: %s", config.general.project)


def training_plan(run: Run) -> None:
    """Stages, sizes, where things are: the seeds' lines."""
    for stage in run.data.stages:
        done = min(max(run.step - stage.start + 1, 0), stage.steps)
        logger.info(
            "[Training Plan] Stage %s has %d remaining training steps and has consumed %d samples",
            stage.name,
            stage.steps - done,
            stage.samples_before(run.step + 1),
        )
    for line in run.data.describe():
        logger.info("%s", line)
    logger.info("[Training Plan] There are %d training stages", len(run.data.stages))
    for stage in run.data.stages:
        logger.info("[Stage %s] start from step %d", stage.name, stage.start)
    tokens = run.config.tokens
    now = run.data.stage_at(min(run.step + 1, tokens.train_steps))
    logger.info(
        "[Start training] datetime: %s | mbs: %d | grad_accum: %d | global_batch_size: %d | sequence_length: %d | "
        "train_steps: %d | start_iteration_step: %d | consumed_train_samples: %d",
        datetime.now(),
        tokens.micro_batch_size,
        tokens.batch_accumulation_per_replica,
        run.config.global_batch_size,
        now.sequence_length,
        tokens.train_steps,
        run.step,
        run.consumed_samples,
    )
    logger.info("%s", console.show_memory(devices.memory(run.device)))


def already_finished(config: Config, start: Start) -> None:
    logger.info(
        "This run is finished: %s has all %d steps. Raise tokens.train_steps to go on, or start over with --fresh.",
        start.path,
        config.tokens.train_steps,
    )


def exhausted(run: Run) -> None:
    logger.info(
        "This run is finished: after step %d of %d, %s. To go on, add a stage that starts at step %d.",
        run.step,
        run.config.tokens.train_steps,
        run.data.exhausted(run.step + 1),
        run.step + 1,
    )


def farewell(run: Run) -> None:
    """Where everything is, and what to do next."""
    folder = Path(run.config.checkpoints.checkpoints_path) / str(run.step)
    state = f"stopped ({run.stop_reason})" if run.stop_reason else "finished"
    logger.info(
        "Run %s at step %d of %d, %s tokens; %.1f%% of the steps' time was waiting for data. Logs: %s",
        state,
        run.step,
        run.config.tokens.train_steps,
        human_format(run.consumed_tokens),
        100 * run.data_wait_seconds / run.seconds if run.seconds else 0.0,
        log_folder(run.config),
    )
    if folder.exists():
        logger.info("Checkpoint: %s. Next:\n%s", folder, "\n".join(f"  {line}" for line in next_commands(run, folder)))


def next_commands(run: Run, folder: Path) -> list[str]:
    """Three commands for a shell in the working folder: read the model, hand it on, look at its curves."""
    us, path, logs = program("kenotron"), shlex.quote(str(folder)), shlex.quote(run.config.logging.log_dir)
    prompt = '--prompt "def main("' if run.tokenizer is not None else "--prompt-tokens 1,2,3"
    curves = f"{program('tensorboard')} --logdir {logs}"
    return [
        f"{us} generate {path} {prompt} --max-new-tokens 64",
        f"{us} convert to-hf {path} {shlex.quote(f'{folder}-hf')}",
        curves if run.config.logging.tensorboard else f"{us} checkpoint show {path}",
    ]


def program(name: str) -> str:
    """How a shell here finds a program: by its name, or by its path in our environment where PATH lacks that."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) or not beside.exists():
        return name
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
