"""Log lines of nanotron, in its order (`logging.format: nanotron`). `report.run_log` imports this module by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.config import dump
from kenotron.config.data_stages import PretrainDataset
from kenotron.config.errors import human_format
from kenotron.parallel import device as devices
from kenotron.training.console import logger, mebibytes
from kenotron.training.report import RunLog

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.data.stage_plan import StagePlan
    from kenotron.models.decoder import Decoder
    from kenotron.training.run import Run


class NanotronLog(RunLog):
    """Logs the lines of nanotron's log, in its order."""

    always_local = True

    def project(self, config: Config) -> None:
        """Log the project's name, before anything is loaded."""
        logger.info("project: %s", config.general.project)

    def config(self, config: Config) -> None:
        """Log the config with all defaults, and the model's config again."""
        logger.info("Config:\n%s", dump(config).rstrip())
        architecture = config.model.architecture.model_dump(mode="json", by_alias=True)
        logger.info("Model Config:\n%s", "\n".join(f"{name}: {value}" for name, value in architecture.items()))
        super().config(config)

    def building(self) -> None:
        """Log the start of the model's construction."""
        logger.info("Building model..")
        logger.info("Setting PP block ranks...")

    def model_size(self, skeleton: Decoder, parts: Sequence[Decoder], device: torch.device) -> None:
        """Log the parameters of the model and of this rank, and the memory of `device`."""
        super().model_size(skeleton, parts, device)
        logger.info("[After model building]%s", _memory_line(device))

    def first_weights(self) -> None:
        """Log the parametrization and its rule of learning rates."""
        logger.info("No checkpoint path provided.")
        logger.info("Parametrizing model parameters using StandardParametrizator")
        logger.info("[Optimizer Building] Using LearningRateForSP as learning rate")

    def plan(self, run: Run) -> None:
        """Log stages, sizes, and the step at which the run starts."""
        for stage, section in zip(run.data.stages, run.config.data_stages, strict=True):
            logger.info(
                "[Training Plan] Stage %s has %d remaining training steps and has consumed %d samples",
                stage.name,
                _remaining(run, stage),
                stage.samples_before(run.step + 1),
            )
            if isinstance(section.data.dataset, PretrainDataset):
                _log_libraries(run)
        for line in run.data.describe():
            logger.info("%s", line)
        logger.info("[Training Plan] There are %d training stages", len(run.data.stages))
        for stage in run.data.stages:
            logger.info("[Stage %s] start from step %d", stage.name, stage.start)
        tokens = run.config.tokens
        now = run.data.stage_at(min(run.step + 1, run.end))
        logger.info("")
        logger.info(
            "[Start training] datetime: %s | mbs: %d | grad_accum: %d | global_batch_size: %d | sequence_length: %d | "
            "train_steps: %d | start_iteration_step: %d | consumed_train_samples: %d",
            datetime.now(),
            tokens.micro_batch_size,
            tokens.batch_accumulation_per_replica,
            run.config.global_batch_size,
            now.sequence_length,
            run.end,
            run.step,
            run.consumed_samples,
        )
        logger.info(
            "Resuming training from stage %s, it has trained for %d samples and has %d remaining train steps",
            now.name,
            now.samples_before(run.step + 1),
            _remaining(run, now),
        )
        logger.info("%s", _memory_line(run.device))

    def step(self, run: Run, fields: Mapping[str, float], recorded: Mapping[str, float]) -> None:
        """Log the iteration line, after a line of memory if `fields` has memory."""
        if "hd_total_memory_tb" in fields:
            logger.info("%s", _memory_line(run.device))
        logger.info("%s", _iteration_line({**fields, **recorded}, run.last_step))

    def saving(self, folder: Path) -> None:
        """Log a warning before a checkpoint is written, as nanotron does."""
        logger.warning("Saving checkpoint at %s", folder)


def _remaining(run: Run, stage: StagePlan) -> int:
    return stage.steps - min(max(run.step - stage.start + 1, 0), stage.steps)


def _log_libraries(run: Run) -> None:
    versions = tuple(version(name) for name in ("transformers", "huggingface_hub"))
    tokenizer = run.config.tokenizer.tokenizer_name_or_path
    logger.info("Using `datasets` library")
    logger.info("Loading tokenizer from %s and transformers/hf_hub versions %s", tokenizer, versions)


def _iteration_line(fields: Mapping[str, float], last_step: int) -> str:
    """Format raw `fields` as ``iteration: 5 / 15 | consumed_tokens: 2.56K | …``, in their order."""
    shown = [f"iteration: {fields['iteration']} / {last_step}"]
    shown += [f"{name}: {human_format(value)}" for name, value in fields.items() if name != "iteration"]
    return " | ".join(shown)


def _memory_line(device: torch.device) -> str:
    """Format the numbers of `device.memory` as nanotron's line."""
    line = " Memory usage: {allocated}. Peak allocated {peak_allocated}. Peak reserved: {peak_reserved}"
    return line.format(**{name: mebibytes(count) for name, count in devices.memory(device).items()})
