"""The whole config: its sections, what is derived from several of them, and the checks across them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from kenotron.config.architecture import (
    HFArchitecture,
    LlamaArchitecture,
    Qwen2Architecture,
    Starcoder2Architecture,
    odd_head_dim,
)
from kenotron.config.checkpoints import Checkpoints
from kenotron.config.data import TEXT_DATASETS, DataStage, MixtureDataset
from kenotron.config.general import General
from kenotron.config.lighteval import Lighteval
from kenotron.config.logging import Logging, MetricsLogging
from kenotron.config.model import Model
from kenotron.config.optimizer import Optimizer
from kenotron.config.parallelism import Parallelism
from kenotron.config.profiler import Profiler
from kenotron.config.s3_upload import S3Upload
from kenotron.config.section import Section, key, null_means, problem
from kenotron.config.tokenizer import Tokenizer
from kenotron.config.tokens import Tokens


def _in_order(stages: list[DataStage]) -> list[DataStage]:
    """The stages sorted by their start, once it is seen that names and starts differ and one starts at 1."""
    for i, stage in enumerate(stages):
        for name in ("name", "start_training_step"):
            value = getattr(stage, name)
            if value in (getattr(other, name) for other in stages[:i]):
                raise problem(f"{i}.{name}", f"expected one that no other stage has, found {value!r} twice")
    ordered = sorted(stages, key=lambda stage: stage.start_training_step)
    if ordered and ordered[0].start_training_step != 1:
        first = stages.index(ordered[0])
        found = ordered[0].start_training_step
        raise problem(f"{first}.start_training_step", f"expected one stage that starts at 1, found {found}")
    return ordered


class Config(Section):
    """One run. Attributes are the YAML keys, but for `model.architecture` (YAML: `model.model_config`)."""

    general: General = key("What the run is called, and its seed.")
    parallelism: Annotated[Parallelism, null_means(Parallelism())] = key(
        "How many ways each axis splits the run.", Parallelism()
    )
    model: Model = key("Architecture, first weights, precision.")
    tokenizer: Annotated[Tokenizer, null_means(Tokenizer())] = key("The tokenizer.", Tokenizer())
    checkpoints: Checkpoints = key("Saving and resuming.")
    logging: Annotated[Logging, null_means(Logging())] = key("What is printed and written down.", Logging())
    metrics_logging: Annotated[MetricsLogging, null_means(MetricsLogging())] = key(
        "Statistics of parameters and gradients.", MetricsLogging()
    )
    tokens: Tokens = key("Sequence length, batch, steps, validation.")
    optimizer: Optimizer = key("Update rule and learning rate.")
    data_stages: Annotated[list[DataStage], AfterValidator(_in_order)] = key(
        "What is read, from which step on.", min_length=1
    )
    profiler: Profiler | None = key("A torch trace of some steps.", None)
    lighteval: Lighteval | None = key("Evaluation jobs that follow the checkpoints (not supported yet).", None)
    s3_upload: S3Upload | None = key("Copies of checkpoints in object storage (not supported yet).", None)

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step."""
        tokens = self.tokens
        return tokens.micro_batch_size * tokens.batch_accumulation_per_replica * self.parallelism.dp

    @model_validator(mode="after")
    def _checks(self) -> Self:
        checks = (_check_heads, _check_tokenizer, _check_steps, _check_company, _check_evaluation)
        problems = [problem for check in checks for problem in check(self)]
        if problems:
            raise PydanticCustomError("checks", "several checks failed", {"problems": problems})
        return self


Problem = tuple[str, str]  # the key to change, and what is wrong


def _check_heads(config: Config) -> Iterator[Problem]:
    model, tp = config.model.architecture, config.parallelism.tp
    if not isinstance(model, LlamaArchitecture | Qwen2Architecture | Starcoder2Architecture):
        return
    heads = model.num_attention_heads
    if problem := odd_head_dim(model.hidden_size, heads):
        yield "model.model_config.hidden_size", problem
    if isinstance(model, Starcoder2Architecture):
        kv, kv_key = model.num_kv_heads or (1 if not model.grouped_query else heads), "num_kv_heads"
    else:
        kv, kv_key = model.num_key_value_heads or heads, "num_key_value_heads"
    at = "model.model_config."
    if model.hidden_size % heads:
        yield (
            at + "num_attention_heads",
            f"expected a divisor of hidden_size {model.hidden_size}, found {heads}",
        )
    if kv > heads or heads % kv:
        yield at + kv_key, f"expected a divisor of num_attention_heads {heads}, found {kv}"
    if heads % tp:
        yield "parallelism.tp", f"expected a divisor of num_attention_heads {heads}, found {tp}"
    elif kv < tp:
        yield "parallelism.tp", f"expected at most {kv_key} {kv}, found {tp}"


def _check_tokenizer(config: Config) -> Iterator[Problem]:
    tokenizer, first = config.tokenizer, True
    for stage in config.data_stages:
        dataset = stage.data.dataset
        parts = dataset.mixture if isinstance(dataset, MixtureDataset) else [dataset]
        texts = [part for part in parts if isinstance(part, TEXT_DATASETS)]
        if texts and not tokenizer.tokenizer_name_or_path and not tokenizer.train:
            yield (
                "tokenizer.tokenizer_name_or_path",
                f"missing: the stage '{stage.name}' reads text (or ask for tokenizer.train)",
            )
            return
        if first and tokenizer.train and not texts:
            yield "tokenizer.train", f"expected text in the first stage, '{stage.name}', to train on"
        first = False
    architecture = config.model.architecture
    entries = tokenizer.train.vocab_size if tokenizer.train else 0
    if not isinstance(architecture, HFArchitecture) and entries > architecture.vocab_size:
        yield (
            "tokenizer.train.vocab_size",
            f"expected at most the model's vocab_size {architecture.vocab_size}, found {entries}",
        )


def _check_steps(config: Config) -> Iterator[Problem]:
    schedule, steps = config.optimizer.learning_rate_scheduler, config.tokens.train_steps
    at = "optimizer.learning_rate_scheduler."
    if schedule.lr_decay_style == "step" and schedule.lr_step_size is None:
        yield at + "lr_step_size", "missing: lr_decay_style step drops every lr_step_size steps"
    if schedule.decay_start < schedule.lr_warmup_steps:
        yield (
            at + "lr_decay_starting_step",
            f"expected at least lr_warmup_steps {schedule.lr_warmup_steps}, found {schedule.decay_start}",
        )
    if schedule.final_lr > schedule.learning_rate:
        yield (
            at + "min_decay_lr",
            f"expected at most learning_rate {schedule.learning_rate}, found {schedule.final_lr}",
        )
    profiler = config.profiler
    if profiler and profiler.profiler_export_path and steps < profiler.steps:
        yield (
            "profiler",
            f"expected tokens.train_steps of at least {profiler.steps} for its trace, found {steps}",
        )


def _check_company(config: Config) -> Iterator[Problem]:
    """Keys that do nothing without another."""
    tokens, checkpoints = config.tokens, config.checkpoints
    if tokens.val_samples is not None and not tokens.limit_val_batches:
        yield "tokens.limit_val_batches", "expected -1 or a number above 0 beside tokens.val_samples, found 0"
    if checkpoints.keep_every is not None and checkpoints.keep_last is None:
        yield "checkpoints.keep_last", "missing: checkpoints.keep_every keeps some of what keep_last would delete"


def _check_evaluation(config: Config) -> Iterator[Problem]:
    evaluation = config.lighteval
    if not evaluation:
        return
    if evaluation.upload_to_wandb:
        for name in ("s3_save_path", "wandb_project", "wandb_entity"):
            if getattr(evaluation, name) is None:
                yield f"lighteval.{name}", "missing: upload_to_wandb needs it"
    interval, every = evaluation.eval_interval, config.checkpoints.checkpoint_interval
    if config.s3_upload and interval is not None and interval % every:
        yield (
            "lighteval.eval_interval",
            f"expected a multiple of checkpoint_interval {every}, found {interval}",
        )
