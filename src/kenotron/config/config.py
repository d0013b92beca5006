"""The complete config: its sections, values derived from several of them, and checks across sections."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from kenotron.config.checkpoints import Checkpoints, DataStates, S3Upload
from kenotron.config.data_stages import ONLY_TRAINING, SFT_DATASETS, TEXT_DATASETS, DataStage, PlainDataset, paths_of
from kenotron.config.decoder import DecoderArchitecture, Problem
from kenotron.config.doremi import DoReMi
from kenotron.config.errors import nearest
from kenotron.config.evaluation import Evaluation
from kenotron.config.general import General
from kenotron.config.logging import Logging, MetricsLogging
from kenotron.config.model import Distillation, ExistingCheckpointInit, Headless, Model, SpectralInit
from kenotron.config.optimizer import Optimizer
from kenotron.config.parallelism import CONTIGUOUS_METHODS, STRATEGIES, V_ENGINES, ZERO_BUBBLE_ENGINES, Parallelism
from kenotron.config.profiler import Profiler
from kenotron.config.remote_data import RemoteData
from kenotron.config.section import Section, key, null_means, our_key, problem
from kenotron.config.tokenizer import Tokenizer
from kenotron.config.tokens import Tokens


def _in_order(stages: list[DataStage]) -> list[DataStage]:
    """Return the stages sorted by their start. Names and starts must be unique, and one must start at 1."""
    for i, stage in enumerate(stages):
        for name in ("name", "start_training_step"):
            value = getattr(stage, name)
            if value in (getattr(other, name) for other in stages[:i]):
                raise problem(f"{i}.{name}", f"expected a value that no other stage has, found {value!r} twice")
    ordered = sorted(stages, key=lambda stage: stage.start_training_step)
    if ordered and ordered[0].start_training_step != 1:
        first = stages.index(ordered[0])
        found = ordered[0].start_training_step
        raise problem(f"{first}.start_training_step", f"expected one stage that starts at 1, found {found}")
    return ordered


class Config(Section):
    """The config of a run. Attributes are the YAML keys, except `model.architecture` (YAML: `model.model_config`)."""

    general: General = key("Name and seed of the run.")
    parallelism: Annotated[Parallelism, null_means(Parallelism())] = key("Degrees of the parallel axes.", Parallelism())
    model: Model = key("Architecture, initial weights, precision.")
    tokenizer: Annotated[Tokenizer, null_means(Tokenizer())] = key("The tokenizer.", Tokenizer())
    checkpoints: Checkpoints = key("Saving and resuming.")
    logging: Annotated[Logging, null_means(Logging())] = key("What is printed and logged.", Logging())
    tokens: Tokens = key("Sequence length, batch size, steps, validation.")
    optimizer: Optimizer = key("Update rule and learning-rate schedule.")
    data_stages: Annotated[list[DataStage], AfterValidator(_in_order)] = key(
        "The data of the run, stage by stage.", min_length=1
    )
    remote_data: Annotated[RemoteData, null_means(RemoteData())] = our_key(
        "How remote files (s3://, gs://, hf://, https://) are read.", RemoteData()
    )
    profiler: Profiler | None = key("A torch profiler trace of some steps.", None)
    metrics_logging: MetricsLogging | None = key("Statistics of every layer.", None)
    doremi: DoReMi | None = key("The domains of the data, and how their weights are learnt.", None)
    evaluation: Evaluation | None = our_key("Tasks on the run's checkpoints, beside training.", None)
    s3_upload: S3Upload | None = key("Upload of the checkpoints of a local checkpoints_path.", None)

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        tokens = self.tokens
        return tokens.micro_batch_size * tokens.batch_accumulation_per_replica * self.parallelism.dp

    @property
    def checkpoint_folder(self) -> Path:
        """The local folder of the run's checkpoints; with a URL as `checkpoints_path`, they wait there for upload."""
        return Path(self.checkpoints.staging_path or self._local_folder(self.checkpoints.checkpoints_path))

    @property
    def resume_folder(self) -> Path | None:
        """`resume_checkpoint_path`, or the local folder that it is fetched to if it is a URL."""
        path = self.checkpoints.resume_checkpoint_path
        return None if path is None else self._local_folder(path)

    def _local_folder(self, path: str) -> Path:
        """Map ``s3://bucket/run`` to ``logs/remote/s3/bucket/run``; a local path stays as it is."""
        return Path(self.logging.log_dir, "remote", path.replace("://", "/")) if "://" in path else Path(path)

    @property
    def begins_remote(self) -> bool:
        """Whether the checkpoint that the run starts from may have to be fetched."""
        return self.upload_url is not None or "://" in (self.checkpoints.resume_checkpoint_path or "")

    @property
    def upload_url(self) -> str | None:
        """The URL that checkpoints are uploaded to; None if they stay on this machine."""
        if "://" in self.checkpoints.checkpoints_path:
            return self.checkpoints.checkpoints_path
        return self.s3_upload.upload_s3_path if self.s3_upload else None

    @property
    def sequence_lengths(self) -> dict[str, int]:
        """Config key → the sequence length that it sets, for the stages in order."""
        lengths = {}
        for i, stage in enumerate(self.data_stages):
            section = "tokens" if stage.sequence_length is None else f"data_stages.{i}"
            lengths[f"{section}.sequence_length"] = stage.sequence_length or self.tokens.sequence_length
        return lengths

    @property
    def datasets(self) -> list[PlainDataset | None]:
        """The datasets of all stages, with mixtures expanded, then those for validation and test."""
        training = [dataset for stage in self.data_stages for dataset in stage.data.datasets]
        return [*training, *(dataset for _, dataset in self.tokens.evaluated)]

    @property
    def masks_documents(self) -> bool:
        """Whether the documents of a sequence are masked from each other, in any stage."""
        return self.model.document_masking or any(isinstance(dataset, SFT_DATASETS) for dataset in self.datasets)

    @property
    def zero_stage(self) -> int | str:
        """0, 1, 2, 3 or "hybrid", from `optimizer.zero_stage` or `parallelism.strategy`."""
        if self.optimizer.zero_stage is not None:
            return self.optimizer.zero_stage
        return STRATEGIES.get(self.parallelism.strategy or "", 0)

    @property
    def expert_sizes(self) -> tuple[int, ...]:
        """(experts, expert width, hidden size) of a layer on one rank, after ep and tp; empty without experts."""
        model, layout = self.model.architecture, self.parallelism
        if not isinstance(model, DecoderArchitecture) or not model.experts:
            return ()
        return model.experts // layout.expert_parallel_size, model.expert_width // layout.tp, model.hidden_size

    @property
    def kept_dtype(self) -> str:
        """Dtype of weights between steps, of their gradients and of the optimizer's state."""
        return "float32" if self.optimizer.accumulate_grad_in_fp32 else self.model.dtype

    @model_validator(mode="after")
    def _checks(self) -> Self:
        if problems := problems_of(self):
            raise PydanticCustomError("checks", "several checks failed", {"problems": problems})
        return self


def problems_of(config: Config) -> list[Problem]:
    """Return (key, message) for keys of different sections that contradict each other."""
    checks = (
        _check_decoder,
        _check_initial_weights,
        _check_parametrization,
        _check_headless,
        _check_loss,
        _check_precision,
        _check_documents,
        _check_layout,
        _check_ramps,
        _check_tokenizer,
        _check_steps,
        _check_validation,
        _check_checkpoints,
        _check_uploads,
        _check_data,
        _check_domains,
        _check_evaluation,
    )
    return [problem for check in checks for problem in check(config)]


def _check_decoder(config: Config) -> Iterator[Problem]:
    """Yield the problems that the architecture itself reports of its shapes and of the axes that split them."""
    model, tp, ep = config.model.architecture, config.parallelism.tp, config.parallelism.expert_parallel_size
    if isinstance(model, DecoderArchitecture):
        yield from ((f"model.model_config.{name}", problem) for name, problem in model.shape_problems())
        yield from (("parallelism.tp", problem) for problem in model.tp_problems(tp))
        yield from (("parallelism.expert_parallel_size", problem) for problem in model.ep_problems(ep))


def _check_initial_weights(config: Config) -> Iterator[Problem]:
    for number, group in enumerate(config.optimizer.param_groups or ()):
        if group.init_std_scale != 1 and isinstance(config.model.init_method, ExistingCheckpointInit):
            at = f"optimizer.param_groups.{number}.init_std_scale"
            yield at, "has no effect: model.init_method.path has the weights; remove it"


def _check_parametrization(config: Config) -> Iterator[Problem]:
    init, chosen, model = config.model.init_method, config.model.parametrization, config.model.architecture
    at, rules = "model.parametrization", ["adamW", "muon", "normuon"]
    if isinstance(init, SpectralInit):
        if chosen is not None:
            yield at, "expected null with init_method.use_mup, which is another one"
        at, rules = "model.init_method.use_mup", ["adamW"]
    elif chosen is None:
        return
    elif chosen.kind == "completep" and chosen.base_depth is None:
        yield f"{at}.base_depth", "missing: completep needs the depth of the model whose learning rate it is"
    elif chosen.kind == "completep" and getattr(init, "scaling_method", None) == "LAYER_INDEX":
        yield "model.init_method.scaling_method", "expected NUM_LAYERS or NONE with completep, found LAYER_INDEX"
    elif chosen.kind == "mup" and (base := chosen.base_depth) and base != getattr(model, "num_hidden_layers", base):
        yield f"{at}.base_depth", f"expected null or this model's depth; completep is for another one; found {base}"
    used = [factory.name for _, factory in config.optimizer.factories]
    if used[0] not in rules or len(used) > 1:
        yield at, f"its factors are those of {' or '.join(rules)}; found {', '.join(used)}"
    if getattr(model, "tie_word_embeddings", False):
        yield at, "embedding and head learn at different rates; expected tie_word_embeddings false"


def _check_headless(config: Config) -> Iterator[Problem]:
    loss, length = config.model.loss, config.tokens.sequence_length
    if not isinstance(loss, Headless):
        return
    architecture = config.model.architecture
    if not isinstance(architecture, DecoderArchitecture) or architecture.family in ("hf", "module"):
        yield "model.loss", "headless is for the families that are built in"
    elif not architecture.tie_word_embeddings:
        yield "model.model_config.tie_word_embeddings", "expected true: the headless loss has embeddings, and no head"
    if getattr(architecture, "final_logit_softcapping", None) is not None:
        yield "model.model_config.final_logit_softcapping", "expected null: the headless loss has no logits to bound"
    if config.parallelism.context_parallel_size > 1:
        yield "parallelism.context_parallel_size", "expected 1: the headless loss needs whole sequences"
    if (loss.negatives == "block") != (loss.block_size is not None):
        yield "model.loss.block_size", f"expected with negatives: block, and only then; found {loss.block_size}"
    elif loss.block_size is not None and length % loss.block_size:
        yield "model.loss.block_size", f"expected a divisor of sequence_length {length}, found {loss.block_size}"


def _check_loss(config: Config) -> Iterator[Problem]:
    if config.model.loss is not None and getattr(config.model.architecture, "z_loss_enabled", False):
        yield "model.model_config.z_loss_enabled", "is part of cross entropy; expected false with model.loss"
    model = config.model.architecture
    if config.model.loss is not None and isinstance(model, DecoderArchitecture) and model.next_token_layers:
        yield "model.loss", "expected null with num_nextn_predict_layers, whose blocks learn by cross entropy"
    if isinstance(config.model.loss, Distillation) and config.parallelism.context_parallel_size > 1:
        yield "parallelism.context_parallel_size", "expected 1: the teacher of model.loss needs whole sequences"
    if isinstance(config.model.loss, Distillation) and config.model.loss.cache:
        if config.model.loss.top_k is None:
            yield "model.loss.top_k", "missing: model.loss.cache keeps so many probabilities of each token"
        if len(set(config.sequence_lengths.values())) > 1:
            yield "model.loss.cache", "expected null where stages have sequences of different lengths"


def _check_precision(config: Config) -> Iterator[Problem]:
    if config.kept_dtype == "float16":
        reason = "its weights and Adam's second moments would be rounded to zero"
        yield "optimizer.accumulate_grad_in_fp32", f"expected true with model.dtype float16: {reason}"
    if not config.optimizer.stochastic_rounding:
        return
    where = "optimizer.stochastic_rounding"
    if config.kept_dtype != "bfloat16":
        yield where, "expected weights in bf16: model.dtype bfloat16 and optimizer.accumulate_grad_in_fp32 false"
    if other := {factory.name for _, factory in config.optimizer.factories} - {"adamW"}:
        found = ", ".join(sorted(other))
        yield where, f"is for adamW; expected false, and accumulate_grad_in_fp32 true, with {found}"


def _check_domains(config: Config) -> Iterator[Problem]:
    if (doremi := config.doremi) is None:
        return
    count, weights, loss = len(doremi.domain_names), doremi.domain_weights, config.model.loss
    if count < 2 or len(set(doremi.domain_names)) < count:
        yield "doremi.domain_names", f"expected two different names or more, found {', '.join(doremi.domain_names)}"
    if weights is not None and (len(weights) != count or min(weights, default=0) <= 0 or abs(sum(weights) - 1) > 1e-2):
        yield "doremi.domain_weights", f"expected {count} numbers above 0 whose sum is 1, found {weights}"
    for i, stage in enumerate(config.data_stages):
        if (found := len(stage.data.datasets)) != count:
            yield f"data_stages.{i}.data.dataset", f"expected a mixture of {count}, one dataset a domain, found {found}"
    if doremi.ref_model_resume_checkpoint_path is not None and loss is not None:
        yield "model.loss", "expected null in a proxy run (doremi), which learns cross entropy"


def _check_evaluation(config: Config) -> Iterator[Problem]:
    if (evaluation := config.evaluation) is None:
        return
    interval, saved = evaluation.eval_interval, config.checkpoints.checkpoint_interval
    if interval is not None and interval % saved:
        yield "evaluation.eval_interval", f"expected a multiple of checkpoint_interval {saved}, found {interval}"
    if not (config.tokenizer.train or config.tokenizer.tokenizer_name_or_path):
        yield "evaluation.tasks", "need a tokenizer; expected tokenizer.tokenizer_name_or_path"
    if evaluation.ema and config.optimizer.ema_decay is None:
        yield "evaluation.ema", "expected optimizer.ema_decay beside it"


def _check_documents(config: Config) -> Iterator[Problem]:
    model, lengths = config.model.architecture, config.sequence_lengths
    name = max(lengths, key=lengths.__getitem__)
    problem = isinstance(model, DecoderArchitecture) and model.document_problem(lengths[name])
    if config.masks_documents and problem:
        yield name, problem


def _check_layout(config: Config) -> Iterator[Problem]:
    layout, tokens = config.parallelism, config.tokens
    strategy, zero_stage = layout.strategy, config.optimizer.zero_stage
    if strategy is not None and strategy not in STRATEGIES and "." not in strategy:
        yield (
            "parallelism.strategy",
            f"expected {', '.join(STRATEGIES)} or a dotted path, found '{strategy}'{nearest(strategy, STRATEGIES)}",
        )
    elif strategy in STRATEGIES and zero_stage not in (None, STRATEGIES[strategy]):
        yield (
            "parallelism.strategy",
            f"{strategy} means optimizer.zero_stage {STRATEGIES[strategy]}, but that is {zero_stage}; remove one of "
            f"them",
        )
    if layout.dp_shard is not None and layout.dp % layout.dp_shard:
        yield "parallelism.dp_shard", f"expected a divisor of dp {layout.dp}, found {layout.dp_shard}"
    elif layout.dp_shard not in (None, layout.dp) and config.zero_stage == 0:
        yield "parallelism.dp_shard", f"expected a zero_stage above 0, which shards, found 0 beside {layout.dp_shard}"
    if layout.context_parallel_size > 1:
        yield from _check_context_parallel(config)
    for length in dict.fromkeys(config.sequence_lengths.values()):
        local = tokens.micro_batch_size * length // layout.context_parallel_size
        if layout.tp > 1 and layout.tp_mode == "REDUCE_SCATTER" and local % layout.tp:
            yield (
                "parallelism.tp_mode",
                f"REDUCE_SCATTER splits the {local} tokens of a micro-batch over tp {layout.tp}; expected a multiple "
                f"of {layout.tp}",
            )
    if layout.pp > 1:
        yield from _check_pipeline(config)


def _check_context_parallel(config: Config) -> Iterator[Problem]:
    layout, model, lengths = config.parallelism, config.model.architecture, config.sequence_lengths
    method, cp, at = layout.context_parallel_method, layout.context_parallel_size, "parallelism.context_parallel_size"
    parts = cp if method in CONTIGUOUS_METHODS else 2 * cp
    for name, length in lengths.items():
        if length % parts:
            yield (
                at,
                f"{method} splits a sequence into {parts} parts; expected {name} to be a multiple of {parts}, found "
                f"{length}",
            )
    if isinstance(model, DecoderArchitecture):
        yield from ((at, problem) for problem in model.cp_problems(cp, layout.tp, method, lengths))


def _check_pipeline(config: Config) -> Iterator[Problem]:
    layout = config.parallelism
    per_rank, stages = layout.stages_per_rank, layout.pp * layout.stages_per_rank
    if layout.pp_engine in ("afab", "1f1b") and per_rank != 1:
        yield "parallelism.pp_stages_per_rank", f"expected 1 with pp_engine {layout.pp_engine}, found {per_rank}"
    if layout.pp_engine in V_ENGINES and per_rank != 2:
        yield "parallelism.pp_stages_per_rank", f"expected 2 with pp_engine {layout.pp_engine}, found {per_rank}"
    architecture = config.model.architecture
    if isinstance(architecture, DecoderArchitecture):
        yield from (("parallelism.pp", problem) for problem in architecture.pp_problems(layout.pp))
    layers = architecture.num_hidden_layers if isinstance(architecture, DecoderArchitecture) else None
    if layout.pp_layers is not None:
        split = layout.pp_layers
        if len(split) != stages or min(split, default=0) < 1:
            yield "parallelism.pp_layers", f"expected {stages} numbers of at least 1, one a stage, found {split}"
        elif layers is not None and sum(split) != layers:
            yield "parallelism.pp_layers", f"expected a sum of num_hidden_layers {layers}, found {sum(split)}"
    elif layers is not None and layers < stages:
        yield "parallelism.pp", f"expected at most num_hidden_layers {layers} stages, found {stages}"
    if layout.pp_engine in ZERO_BUBBLE_ENGINES and config.zero_stage in (3, "hybrid"):
        yield (
            "optimizer.zero_stage",
            f"{config.zero_stage} frees gathered weights between the two halves of backward that pp_engine "
            f"{layout.pp_engine} runs apart; expected 0, 1 or 2, or pp_engine afab, 1f1b or interleaved_1f1b",
        )
    yield from _check_micro_batches(config)


def _check_micro_batches(config: Config) -> Iterator[Problem]:
    """Check the pipeline schedule's limits on micro-batches, for every batch size of the run."""
    count = config.tokens.batch_accumulation_per_replica
    if expected := _micro_batches_needed(config.parallelism, count):
        yield "tokens.batch_accumulation_per_replica", f"expected {expected}, found {count}"
    per_micro_batch = config.tokens.micro_batch_size * config.parallelism.dp
    for i, stage in enumerate(config.data_stages):
        if ramp := stage.batch_size_ramp:
            for size in range(ramp.start, config.global_batch_size, ramp.increment):
                count, rest = divmod(size, per_micro_batch)
                expected = _micro_batches_needed(config.parallelism, count)
                if rest == 0 and expected:
                    at = f"data_stages.{i}.batch_size_ramp"
                    yield at, f"expected {expected}, found {count} in a step of {size} samples"
                    break


def _micro_batches_needed(layout: Parallelism, count: int) -> str | None:
    """Return what the schedule expects instead of `count` micro-batches, or None if it can run them."""
    least = 2 * layout.pp if layout.pp_engine == "dualpipev" else 1
    if count < least:
        return f"at least {least} micro-batches with pp_engine {layout.pp_engine} and pp {layout.pp}"
    if layout.pp_engine.startswith("interleaved") and count % max(1, count // layout.pp):
        rounds = count // layout.pp
        return (
            f"a multiple of {rounds} micro-batches, which pp_engine {layout.pp_engine} splits into {rounds} rounds "
            f"of at least pp {layout.pp}"
        )
    return None


def _check_ramps(config: Config) -> Iterator[Problem]:
    tokens, size = config.tokens, config.global_batch_size
    per_micro_batch = tokens.micro_batch_size * config.parallelism.dp
    product = f"tokens.micro_batch_size {tokens.micro_batch_size} x dp {config.parallelism.dp} = {per_micro_batch}"
    for i, stage in enumerate(config.data_stages):
        if ramp := stage.batch_size_ramp:
            at = f"data_stages.{i}.batch_size_ramp."
            for name in ("start", "increment"):
                if getattr(ramp, name) % per_micro_batch:
                    yield at + name, f"expected a multiple of {product}, found {getattr(ramp, name)}"
            if ramp.start >= size:
                yield at + "start", f"expected fewer than the global batch of {size} samples, found {ramp.start}"
            elif (rest := size - ramp.start) % ramp.increment:
                difference = f"{rest}, the global batch of {size} samples minus start {ramp.start}"
                yield at + "increment", f"expected a divisor of {difference}, found {ramp.increment}"


def _check_tokenizer(config: Config) -> Iterator[Problem]:
    tokenizer, first = config.tokenizer, config.data_stages[0]
    if tokenizer.train:
        if not any(isinstance(dataset, TEXT_DATASETS) for dataset in first.data.datasets):
            yield "tokenizer.train", f"expected the first stage, '{first.name}', to read text to train on"
        if any(isinstance(dataset, SFT_DATASETS) for dataset in first.data.datasets):
            yield "tokenizer.train", "expected tokenizer_name_or_path instead: fine-tuning data cannot train one"
    elif not tokenizer.tokenizer_name_or_path:
        at = "tokenizer.tokenizer_name_or_path"
        for stage in config.data_stages:
            if any(isinstance(dataset, TEXT_DATASETS) for dataset in stage.data.datasets):
                yield at, f"missing: the stage '{stage.name}' reads text (set it, or tokenizer.train)"
                return
        for key, dataset in config.tokens.evaluated:
            if isinstance(dataset, TEXT_DATASETS):
                yield at, f"missing: {key} is text"
    architecture = config.model.architecture
    entries = tokenizer.train.vocab_size if tokenizer.train else 0
    if isinstance(architecture, DecoderArchitecture) and entries > architecture.vocab_size:
        most = f"the model's vocab_size {architecture.vocab_size}"
        yield "tokenizer.train.vocab_size", f"expected at most {most}, found {entries}"


def _check_steps(config: Config) -> Iterator[Problem]:
    for at, schedule in config.optimizer.schedules:
        if schedule.lr_decay_style == "step" and schedule.lr_step_size is None:
            yield f"{at}.lr_step_size", "missing: lr_decay_style step needs it"
        if (start := schedule.decay_start) < (warmup := schedule.lr_warmup_steps):
            yield f"{at}.lr_decay_starting_step", f"expected at least lr_warmup_steps {warmup}, found {start}"
        if schedule.final_lr > (peak := schedule.learning_rate):
            yield f"{at}.min_decay_lr", f"expected at most learning_rate {peak}, found {schedule.final_lr}"
    profiler, steps = config.profiler, config.tokens.train_steps
    if profiler and profiler.profiler_export_path and steps < profiler.steps:
        yield "profiler", f"expected tokens.train_steps of at least {profiler.steps} for the trace, found {steps}"
    if config.metrics_logging and config.metrics_logging.gradient_noise_scale:
        at = "metrics_logging.gradient_noise_scale"
        if not config.metrics_logging.log_level:
            yield at, "expected metrics_logging.log_level: 1 beside it"
        if config.tokens.batch_accumulation_per_replica == 1 or config.parallelism.pp > 1:
            yield at, "expected tokens.batch_accumulation_per_replica of at least 2, and parallelism.pp: 1"


def _check_validation(config: Config) -> Iterator[Problem]:
    if config.tokens.val_samples is not None and not config.tokens.limit_val_batches:
        yield "tokens.limit_val_batches", "expected -1 or a number above 0 with tokens.val_samples, found 0"
    if config.tokens.limit_test_batches and not config.tokens.test_datasets:
        yield "tokens.test_datasets", "missing: tokens.limit_test_batches asks for a test"
    for at, dataset in config.tokens.evaluated:
        fields = type(dataset).model_fields
        names = ONLY_TRAINING if isinstance(dataset, SFT_DATASETS) else (*ONLY_TRAINING, "packing")
        for name in names:
            if name in fields and getattr(dataset, name) != fields[name].default:
                yield f"{at}.{name}", "has no effect: validation and test read all of a dataset, in order; remove it"
        for name in ("text_files", "tokens"):
            if isinstance(getattr(dataset, name, None), dict):
                yield f"{at}.{name}", "expected a path or a list, found a map: shares have no effect here"


def _check_checkpoints(config: Config) -> Iterator[Problem]:
    checkpoints, folder = config.checkpoints, config.checkpoint_folder
    local, every = checkpoints.local, checkpoints.checkpoint_interval
    for name in ("keep_every", "keep_best"):
        if getattr(checkpoints, name) and checkpoints.keep_last is None:
            yield "checkpoints.keep_last", f"missing: checkpoints.{name} needs it"
    if checkpoints.keep_best and not config.tokens.limit_val_batches:
        yield "tokens.limit_val_batches", "expected a validation, whose loss checkpoints.keep_best compares, found 0"
    if checkpoints.keep_best and config.tokens.val_check_unit != "steps":
        yield "tokens.val_check_unit", "expected steps: checkpoints.keep_best compares those of a validation"
    elif checkpoints.keep_best and every % (validated := config.tokens.val_check_interval):
        needs = "which checkpoints.keep_best compares after a validation"
        yield "checkpoints.checkpoint_interval", f"expected a multiple of val_check_interval {validated}, {needs}"
    if checkpoints.datastates != DataStates() and checkpoints.checkpointing_engine != "datastates":
        yield "checkpoints.checkpointing_engine", "expected datastates, which checkpoints.datastates has settings for"
    if local is not None and local.interval >= every:
        yield "checkpoints.local.interval", f"expected less than checkpoint_interval {every}, found {local.interval}"
    if local is not None and Path(local.path).absolute().is_relative_to(folder.absolute()):
        yield "checkpoints.local.path", f"expected a folder outside of {folder}, found {local.path}"


def _check_uploads(config: Config) -> Iterator[Problem]:
    upload, remote = config.s3_upload, "://" in config.checkpoints.checkpoints_path
    for name in ("staging_path", "remove_after_upload"):
        if getattr(config.checkpoints, name) and not remote:
            yield f"checkpoints.{name}", "expected a URL as checkpoints.checkpoints_path, found a local path"
    if upload is not None and "://" not in upload.upload_s3_path:
        yield "s3_upload.upload_s3_path", f"expected a URL (s3://bucket/run), found {upload.upload_s3_path}"
    if upload is not None and remote:
        yield "s3_upload", "expected null: checkpoints.checkpoints_path is a URL, and checkpoints are uploaded there"


def _check_data(config: Config) -> Iterator[Problem]:
    if config.data_stages[0].data.restart:
        yield "data_stages.0.data.restart", "expected false: there is no stage before the first"
    paths = [path for dataset in config.datasets for path in paths_of(dataset)]
    paths += [path for path in (config.upload_url, config.checkpoints.resume_checkpoint_path) if path is not None]
    if config.remote_data != RemoteData() and not any("://" in path or path.endswith(".json") for path in paths):
        yield "remote_data", "expected a remote path (s3://, gs://, hf://, https://), found none"
