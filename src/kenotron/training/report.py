"""What rank 0 logs about a run before its first step and after its last."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.config import dump
from kenotron.config.data import PretrainDataset
from kenotron.config.warnings import warnings_of
from kenotron.models import named_parameters
from kenotron.models.decoder import Decoder
from kenotron.parallel import device as devices
from kenotron.parallel.shards import shard_of
from kenotron.training import console
from kenotron.training.console import human_format, logger
from kenotron.training.run_folder import log_folder

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.data.stage_plan import StagePlan
    from kenotron.training.run import Run
    from kenotron.training.start import Start


class RunLog:
    """The lines of a plain log (`logging.format`); `NanotronLog` has nanotron's."""

    always_local = False

    def project(self, config: Config) -> None:
        """The project's name, before anything is loaded: printed by `launch`, before torch is."""

    def config(self, config: Config) -> None:
        """The config with all defaults: here at level debug, the run's folder has it, and what is hardly meant."""
        logger.debug("Config:\n%s", dump(config).rstrip())
        for line in warnings_of(config):
            logger.warning("%s", line)
        if config.model.compile:
            logger.info("model.compile: the first step compiles the blocks, which takes up to a minute")

    def building(self) -> None:
        """Before the model is built."""

    def model_size(self, skeleton: Decoder, parts: Sequence[Decoder], device: torch.device) -> None:
        """Parameters of the whole model (`skeleton`) and of this rank's `parts`, if those are fewer."""
        counts = parameter_counts(skeleton, parts)
        width = next(parts[0].parameters()).element_size()
        for name, count in counts.items():
            if name == "Total" or self.always_local or count != counts["Total"]:
                size = console.mebibytes(count * width)
                logger.info("%s number of parameters: %s (%s)", name, human_format(count), size)

    def first_weights(self) -> None:
        """After weights were drawn and the optimizer was made."""

    def plan(self, run: Run) -> None:
        """Data, batch, steps, and where the run's files are."""
        for line in run.data.describe():
            logger.info("%s", line)
        now = run.data.stage_at(min(run.step + 1, run.config.tokens.train_steps))
        logger.info(
            "Training from step %d to %d: %d sequences of %d tokens a step (micro_batch_size %d). Logs: %s",
            run.step + 1,
            run.config.tokens.train_steps,
            run.config.global_batch_size,
            now.sequence_length,
            run.config.tokens.micro_batch_size,
            log_folder(run.config),
        )

    def step(self, run: Run, fields: Mapping[str, float], recorded: Mapping[str, float]) -> None:
        """One step's numbers, and those that hooks recorded."""
        logger.info("%s", console.plain_line(fields, recorded, run.last_step))

    def saving(self, folder: Path) -> None:
        """Before a checkpoint is written."""


class NanotronLog(RunLog):
    """The same in the lines of nanotron's log, in its order."""

    always_local = True

    def project(self, config: Config) -> None:
        """The project's name, before anything is loaded."""
        logger.info("project: %s", config.general.project)

    def config(self, config: Config) -> None:
        """The config with all defaults, and the model's once more."""
        logger.info("Config:\n%s", dump(config).rstrip())
        architecture = config.model.architecture.model_dump(mode="json", by_alias=True)
        logger.info("Model Config:\n%s", "\n".join(f"{name}: {value}" for name, value in architecture.items()))
        super().config(config)

    def building(self) -> None:
        """Before the model is built."""
        logger.info("Building model..")
        logger.info("Setting PP block ranks...")

    def model_size(self, skeleton: Decoder, parts: Sequence[Decoder], device: torch.device) -> None:
        """Parameters of the model and of this rank, and the memory of `device`."""
        super().model_size(skeleton, parts, device)
        logger.info("[After model building]%s", console.show_memory(devices.memory(device)))

    def first_weights(self) -> None:
        """The parametrization and its rule of learning rates."""
        logger.info("No checkpoint path provided.")
        logger.info("Parametrizing model parameters using StandardParametrizator")
        logger.info("[Optimizer Building] Using LearningRateForSP as learning rate")

    def plan(self, run: Run) -> None:
        """Stages, sizes, and where the run starts."""
        for stage, section in zip(run.data.stages, run.config.data_stages, strict=True):
            logger.info(
                "[Training Plan] Stage %s has %d remaining training steps and has consumed %d samples",
                stage.name,
                self._remaining(run, stage),
                stage.samples_before(run.step + 1),
            )
            if isinstance(section.data.dataset, PretrainDataset):
                self._libraries(run)
        for line in run.data.describe():
            logger.info("%s", line)
        logger.info("[Training Plan] There are %d training stages", len(run.data.stages))
        for stage in run.data.stages:
            logger.info("[Stage %s] start from step %d", stage.name, stage.start)
        tokens = run.config.tokens
        now = run.data.stage_at(min(run.step + 1, tokens.train_steps))
        logger.info("")
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
        logger.info(
            "Resuming training from stage %s, it has trained for %d samples and has %d remaining train steps",
            now.name,
            now.samples_before(run.step + 1),
            self._remaining(run, now),
        )
        self._memory(run)

    @staticmethod
    def _remaining(run: Run, stage: StagePlan) -> int:
        return stage.steps - min(max(run.step - stage.start + 1, 0), stage.steps)

    @staticmethod
    def _libraries(run: Run) -> None:
        versions = tuple(version(name) for name in ("transformers", "huggingface_hub"))
        tokenizer = run.config.tokenizer.tokenizer_name_or_path
        logger.info("Using `datasets` library")
        logger.info("Loading tokenizer from %s and transformers/hf_hub versions %s", tokenizer, versions)

    @staticmethod
    def _memory(run: Run) -> None:
        logger.info("%s", console.show_memory(devices.memory(run.device)))

    def step(self, run: Run, fields: Mapping[str, float], recorded: Mapping[str, float]) -> None:
        """The iteration line, below the memory where that has it."""
        if "hd_total_memory_tb" in fields:
            self._memory(run)
        logger.info("%s", console.nanotron_line({**fields, **recorded}, run.last_step))

    def saving(self, folder: Path) -> None:
        """Before a checkpoint is written: a warning, as there."""
        logger.warning("Saving checkpoint at %s", folder)


def parameter_counts(skeleton: Decoder, parts: Sequence[Decoder]) -> dict[str, int]:
    """Parameters of the whole model (``Total``) and of this rank's shard of it (``Local``)."""
    here = [shard_of(parameter).tensor for part in parts for parameter in part.parameters()]
    total = sum(parameter.numel() for _, parameter in named_parameters(skeleton))
    return {"Total": total, "Local": sum(tensor.numel() for tensor in here)}


def run_log(config: Config) -> RunLog:
    """The lines of the run's `logging.format`."""
    return NanotronLog() if config.logging.format == "nanotron" else RunLog()


def already_finished(config: Config, start: Start) -> None:
    """Why nothing is done: the checkpoint has all steps."""
    logger.info(
        "This run is finished: %s has all %d steps. Raise tokens.train_steps to go on, or start over with --fresh.",
        start.path,
        config.tokens.train_steps,
    )


def exhausted(run: Run) -> None:
    """Why nothing is done: the data allow no further step."""
    logger.info(
        "This run is finished: after step %d of %d, %s. To go on, add a stage that starts at step %d.",
        run.step,
        run.config.tokens.train_steps,
        run.data.exhausted(run.step + 1),
        run.step + 1,
    )


def farewell(run: Run) -> None:
    """Where logs and checkpoint are, and the commands to use them."""
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
    """Three commands for a shell in the working folder: generate, convert to Hugging Face, show the curves."""
    us, path, logs = program("kenotron"), shlex.quote(str(folder)), shlex.quote(run.config.logging.log_dir)
    prompts = run.config.logging.sample_prompts
    prompt = f"--prompt {shlex.quote(prompts[0])} " if prompts else "" if run.tokenizer else "--prompt-tokens 1,2,3 "
    curves = f"{program('tensorboard')} --logdir {logs}"
    return [
        f"{us} generate {path} {prompt}--max-new-tokens 64",
        f"{us} convert to-hf {path} {shlex.quote(f'{folder}-hf')}",
        curves if run.config.logging.tensorboard else f"{us} checkpoint show {path}",
    ]


def program(name: str) -> str:
    """How a shell here finds a program: by its name, or by its path in this environment if PATH lacks that."""
    beside = Path(sys.executable).with_name(name)
    if shutil.which(name) or not beside.exists():
        return name
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
