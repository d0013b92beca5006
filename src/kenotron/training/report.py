"""Log messages of rank 0 about a run, before its first step and after its last."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import human_format
from kenotron.models import named_parameters
from kenotron.models.decoder import Decoder
from kenotron.models.family import family_of
from kenotron.parallel.shards import shard_of
from kenotron.training import console
from kenotron.training.console import logger
from kenotron.training.run_folder import log_folder

if TYPE_CHECKING:
    import torch

    from kenotron.checkpoint.start import Start
    from kenotron.config import Config
    from kenotron.data import RunData
    from kenotron.training.run import Run

LOGS = {"plain": "kenotron.training.report.RunLog", "nanotron": "kenotron.training.nanotron_log.NanotronLog"}
"""`logging.format` → its class."""


class RunLog:
    """Logs the lines of the plain format (`logging.format`); `NanotronLog` logs nanotron's."""

    always_local = False

    def project(self, config: Config) -> None:
        """Called before anything is loaded; `launch` has printed the project's name, before it imported torch."""

    def config(self, config: Config) -> None:
        """Called when the config is final; it is written into the run's folder."""
        if config.model.compile:
            logger.info("model.compile: the first step compiles the blocks, which takes up to a minute")

    def building(self) -> None:
        """Called before the model is built."""

    def model_size(self, skeleton: Decoder, parts: Sequence[Decoder], device: torch.device) -> None:
        """Log the parameters of the whole model (`skeleton`), and of this rank's `parts` if they have fewer."""
        counts = parameter_counts(skeleton, parts)
        width = next(parts[0].parameters()).element_size()
        for name, count in counts.items():
            if name == "Total" or self.always_local or count != counts["Total"]:
                size = console.mebibytes(count * width)
                logger.info("%s number of parameters: %s (%s)", name, human_format(count), size)

    def first_weights(self) -> None:
        """Called after random weights were drawn and the optimizer was built."""

    def plan(self, run: Run) -> None:
        """Log data, batch, steps, and the folder of the run's logs."""
        for line in run.data.describe():
            logger.info("%s", line)
        now = run.data.stage_at(min(run.step + 1, run.end))
        logger.info(
            "Training from step %d to %d: %d sequences of %d tokens a step (micro_batch_size %d). Logs: %s",
            run.step + 1,
            run.end,
            run.config.global_batch_size,
            now.sequence_length,
            run.config.tokens.micro_batch_size,
            log_folder(run.config),
        )
        logger.info("%s", _amount(run))

    def step(self, run: Run, fields: Mapping[str, float], recorded: Mapping[str, float]) -> None:
        """Log one step's metrics, and the metrics that hooks recorded."""
        logger.info("%s", console.plain_line(fields, recorded, run.last_step))

    def saving(self, folder: Path) -> None:
        """Called before a checkpoint is written."""


def _amount(run: Run) -> str:
    """Return ``61.4K tokens in all, 4.1K a step; until step 15 of stage 'text': 0.52 epochs of text``."""
    step = min(run.step + 1, run.last_step)
    now = run.data.stage_at(step)
    a_step = now.batch_size(step) * now.sequence_length
    last = min(now.stop - 1, run.last_step)
    epochs = run.data.describe_epochs(last)
    return f"{human_format(run.total_tokens)} tokens in all, {human_format(a_step)} a step{epochs}"


def parameter_counts(skeleton: Decoder, parts: Sequence[Decoder]) -> dict[str, int]:
    """Count the parameters of the whole model (``Total``) and of this rank's shard of it (``Local``)."""
    local = [shard_of(parameter).tensor for part in parts for parameter in part.parameters()]
    total = sum(parameter.numel() for _, parameter in named_parameters(skeleton))
    return {"Total": total, "Local": sum(tensor.numel() for tensor in local)}


def run_log(config: Config) -> RunLog:
    """Return the log of the run's `logging.format`."""
    return import_dotted(LOGS[config.logging.format], "logging.format")()


def already_finished(start: Start) -> str:
    """Return the message for a run whose checkpoint has all steps already."""
    return (
        f"This run is finished: {start.path} has all {start.step} steps. "
        "Raise tokens.train_steps to continue, or start over with --fresh."
    )


def exhausted(data: RunData, start: Start) -> str:
    """Return the message for a run whose data allow no further step."""
    return (
        f"This run is finished: after step {start.step} of {data.config.tokens.train_steps}, "
        f"{data.exhausted(start.step + 1)}. "
        f"To continue, add a stage that starts at step {start.step + 1 - start.data_start}."
    )


def farewell(run: Run) -> None:
    """Log the paths of logs and checkpoint, and commands to use them."""
    folder = run.config.checkpoint_folder / str(run.step)
    state = f"stopped ({run.stop_reason})" if run.stop_reason else "finished"
    logger.info(
        "Run %s at step %d of %d, %s tokens; %.1f%% of the steps' time was waiting for data. Logs: %s",
        state,
        run.step,
        run.end,
        human_format(run.consumed_tokens),
        100 * run.data_wait_seconds / run.seconds if run.seconds else 0.0,
        log_folder(run.config),
    )
    settings, url = run.config.checkpoints, run.config.upload_url
    saved = settings.save_final_state or run.stop_reason or run.step % settings.checkpoint_interval == 0
    location = str(folder) if folder.exists() else ""
    if not location and url and saved:  # the local copy was removed after its upload
        location = f"{url.rstrip('/')}/{run.step}"
    if location:
        logger.info("Checkpoint: %s. Next:\n  %s", location, "\n  ".join(next_commands(run, location)))


def next_commands(run: Run, checkpoint: str) -> list[str]:
    """Return shell commands for the working folder: generate, convert to Hugging Face if supported, write a page."""
    kenotron, path, logs = program("kenotron"), shlex.quote(checkpoint), shlex.quote(str(log_folder(run.config)))
    prompt = "" if run.tokenizer else "--prompt-tokens 1,2,3 "
    if prompts := run.config.logging.sample_prompts:
        prompt = f"--prompt {shlex.quote(prompts[0])} "
    commands = [f"{kenotron} generate {path} {prompt}--max-new-tokens 64"]
    if family_of(run.config.model.decoder).hf_class:
        exported = shlex.quote(str(run.config.checkpoint_folder / f"{run.step}-hf"))
        commands.append(f"{kenotron} convert to-hf {path} {exported}")
    return [*commands, f"{kenotron} report {logs}"]


def program(name: str) -> str:
    """Return a program's name for a shell command, or its path in this environment if it is not on PATH."""
    path = Path(sys.executable).with_name(name)
    if shutil.which(name) or not path.exists():
        return name
    folder = Path.cwd()
    return shlex.quote(str(path.relative_to(folder) if path.is_relative_to(folder) else path))
