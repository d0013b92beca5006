"""The table behind test_every_key.py: for every key of the config, a change and what it must change.

    "Optimizer.weight_decay": Row(final_weights, "optimizer.weight_decay=0.5"),

`base` holds overrides that both runs have. `{folder}` stands for the folder that `text_files` below fills.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.schema import Row as SchemaRow
from support import family_keys
from support.tiny_run import metrics, weights


@dataclass(frozen=True)
class Outcome:
    """A run that is over: where its files are, what it was, what it said."""

    folder: Path
    config: Any
    run: Any
    said: str


def bits(tensors: dict[str, Any]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def initial_weights(o: Outcome) -> Any:
    assert o.run.step == 0
    return bits(weights(o.run))


def final_weights(o: Outcome) -> Any:
    assert o.run.step > 0
    return bits(weights(o.run))


def initial_names(o: Outcome) -> Any:
    return sorted(initial_weights(o))


def first_loss(o: Outcome) -> Any:
    return metrics(o.config)[0]["lm_loss"]


def last_loss(o: Outcome) -> Any:
    return metrics(o.config)[-1]["lm_loss"]


def rates(o: Outcome) -> Any:
    return [step["lr"] for step in metrics(o.config)]


def tokens(o: Outcome) -> Any:
    """What the model is fed in steps 1 to 3."""
    batches = [batch for step in (1, 2, 3) for batch in o.run.data.batch(step)]
    return [(b.tokens.tobytes(), b.labels.tobytes()) for b in batches]


def micro_batches(o: Outcome) -> Any:
    return [batch.tokens.shape for batch in o.run.data.batch(1)]


def steps(o: Outcome) -> Any:
    return [step["iteration"] for step in metrics(o.config)]


def metric(name: str) -> Callable[[Outcome], Any]:
    def look(o: Outcome) -> Any:
        return [step.get(name) for step in metrics(o.config)]

    look.__name__ = name
    return look


def recomputes(o: Outcome) -> Any:
    return [s["hardware_tflops_per_gpu"] / s["model_tflops_per_gpu"] > 1.05 for s in metrics(o.config)]


def checkpoints(o: Outcome) -> Any:
    return sorted(path.name for path in (o.folder / "checkpoints").iterdir() if path.is_dir())


def files(o: Outcome) -> Any:
    """Names of all files below the folder, those of checkpoints and of TensorBoard by their folder."""
    found = {str(path.relative_to(o.folder)) for path in o.folder.rglob("*") if path.is_file()}
    return {name.split("events.out")[0] for name in found}


def messages(o: Outcome) -> Any:
    """What was said, times and sizes left out; without the config, which nanotron's format has."""
    lines = [line.split("]: ", 1)[-1] for line in o.said.splitlines()]
    start = next((i for i, line in enumerate(lines) if line.startswith(("Weights ", "Loaded "))), 0)
    kinds = ("step", "iteration", "Sample", "[", "Saved", "Read back", "before", "after")
    return [" ".join(line.split()[:3]) for line in lines[start:] if line.startswith(kinds)]


def attention(o: Outcome) -> Any:
    """What it said of its attention; test_attention_functions.py shows what the functions compute."""
    return [line.split("Attention: ")[1] for line in o.said.splitlines() if "Attention: " in line]


def engine(o: Outcome) -> Any:
    """What saves, and what it works with: test_engines.py shows what comes of it."""
    engine, names = o.run.checkpoints.engine, ("most_bytes", "threads", "pin")
    return type(engine), engine.open_file, [getattr(engine, name, None) for name in names]


def warnings(o: Outcome) -> Any:
    return o.said.count("warning: ")


def printed_config(o: Outcome) -> Any:
    return (o.folder / "logs" / o.config.general.run / "config.yaml").read_text()


def rows_in_memory(o: Outcome) -> Any:
    return tuple(o.run.model.model.embed_tokens.weight.shape)


def fused(o: Outcome) -> Any:
    return [group["fused"] for group in o.run.optimizer.param_groups if "fused" in group]


def trace_steps(o: Outcome) -> Any:
    """The steps that each trace of the profiler recorded."""
    return [sorted({e["name"] for e in trace if e.get("name", "").startswith("ProfilerStep")}) for trace in _traces(o)]


def trace_arguments(o: Outcome) -> Any:
    """Names of what the traces tell about their events."""
    return {(name, key) for t in _traces(o) for e in t for name in [e.get("cat")] for key in e.get("args", {})}


def trace_allocations(o: Outcome) -> Any:
    return any(event.get("name") == "[memory]" for trace in _traces(o) for event in trace)


def _traces(o: Outcome) -> list[list[dict[str, Any]]]:
    found = sorted((o.folder / "traces").rglob("*.pt.trace.json"), key=lambda path: path.name.split(".")[-4])
    return [json.loads(path.read_text())["traceEvents"] for path in found]


# What shows as soon as a run is built, and what only a run with checkpoints has; the others look at a run to its end.
BUILT = {tokens, micro_batches, rows_in_memory, fused, initial_weights, initial_names}
SAVED = {checkpoints, files, messages}


@dataclass(frozen=True)
class Row:
    """`change` on top of `base` must make `differs` differ."""

    differs: Callable[[Outcome], Any]
    change: str | tuple[str, ...]
    base: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[str, ...]:
        """`base` and `change`."""
        return (*self.base, *((self.change,) if isinstance(self.change, str) else self.change))


# Refused as not supported yet.
REFUSED: dict[str, str] = {**family_keys.REFUSED}
# Not in the schema, and refused by name.
UNSERVED = ["lighteval={}", "lighteval={slurm: {qos: low}}"]


def owner(row: SchemaRow) -> str:
    """The section that a key is listed under: for architectures the class that declares it, which families share."""
    if not issubclass(row.section, DecoderArchitecture):
        return row.section.__name__
    name = next(name for name, field in row.section.model_fields.items() if (field.alias or name) == row.name)
    return next(base.__name__ for base in row.section.__mro__ if name in vars(base).get("__annotations__", {}))


# Accepted, and by their description without effect on one machine at degree 1: the run stays the same to the bit.
SAME: dict[str, str] = {
    "Parallelism.pp_engine": "parallelism.pp_engine=1f1b",
    "Parallelism.tp_mode": "parallelism.tp_mode=REDUCE_SCATTER",
    "Parallelism.tp_linear_async_communication": "parallelism.tp_linear_async_communication=true",
    "Parallelism.tp_recompute_allgather": "parallelism.tp_recompute_allgather=false",
    "Parallelism.context_parallel_method": "parallelism.context_parallel_method=ulysses",
    "Parallelism.strategy": "parallelism.strategy=ddp",
    "Optimizer.zero_stage": "optimizer.zero_stage=1",
    "Checkpoints.checkpoints_path_is_shared_file_system": "checkpoints.checkpoints_path_is_shared_file_system=true",
    "LlamaArchitecture.is_llama_config": "model.model_config.is_llama_config=false",
    "Model.ddp_bucket_cap_mb": "model.ddp_bucket_cap_mb=100",
    "General.step": "general.step=100",
    "General.consumed_train_samples": "general.consumed_train_samples=100",
}

# Their effect is in what is exported, or in generation: the run stays the same, and the checkpoint tells the value.
EXPORTED: dict[str, str] = {
    "DecoderArchitecture.initializer_range": "model.model_config.initializer_range=0.5",
    "AttentionArchitecture.max_position_embeddings": "model.model_config.max_position_embeddings=100",
    "DecoderArchitecture.pad_token_id": "model.model_config.pad_token_id=3",
    "LlamaArchitecture.pretraining_tp": "model.model_config.pretraining_tp=4",
    "DecoderArchitecture.use_cache": "model.model_config.use_cache=false",
    "DecoderArchitecture.bos_token_id": "model.model_config.bos_token_id=5",
    **family_keys.EXPORTED,
}

ARCHITECTURE = "model.model_config."
DATASET = "data_stages.0.data.dataset"
FACTORY = "optimizer.optimizer_factory"
SCHEDULE = "optimizer.learning_rate_scheduler."
VALIDATION = ("tokens.val_check_interval=3", "tokens.limit_val_batches=3")
# Of three steps at this rate the first gives the lowest validation loss.
WORSE = ("checkpoints.checkpoint_interval=1", "checkpoints.keep_last=1", "tokens.val_check_interval=1")
WORSE += ("tokens.limit_val_batches=3", "optimizer.learning_rate_scheduler.learning_rate=0.5")
TEST = ("tokens.test_datasets=[{source: support.user_parts.counting}]", "tokens.limit_test_batches=1")
OWN_VALIDATION = "tokens.val_datasets=[{source: support.user_parts.counting}]"
TEXT = (
    f"{DATASET}={{text_files: '{{folder}}/a.jsonl'}}",
    "tokenizer={train: {vocab_size: 300}}",
    "model.model_config.vocab_size=320",
    "model.model_config.eos_token_id=0",
)
EXPERTS = ("model.model_config.is_mixtral_config=true",)
STREAM = (*TEXT, "data_stages.0.data.dataset.streaming={shuffle_buffer: 20}")
STREAMS = (*STREAM, f"{DATASET}.text_files=['{{folder}}/a.jsonl', '{{folder}}/b.jsonl']")
HUB = (f"{DATASET}={{hf_dataset_or_datasets: '{{folder}}/rows', hf_dataset_splits: train}}", *TEXT[1:])
USER = (f"{DATASET}={{source: support.user_parts.counting}}",)
WORDS = ("tokenizer.tokenizer_name_or_path={folder}/words", "model.model_config.vocab_size=320")
LETTERS = ("tokenizer.tokenizer_name_or_path={folder}/letters", WORDS[1], "tokens.sequence_length=64")
UP, DOWN = "source: support.user_parts.counting", "source: support.user_parts.counting_down"
ANSWERS = "sft_dataloader: true, prompt_column_name: text, completion_column_name: other"
SFT = (f"{DATASET}={{hf_dataset_or_datasets: '{{folder}}/rows', {ANSWERS}}}", *LETTERS)
SFT_TEST = (f"{DATASET}.hf_dataset_splits=test", f"{DATASET}.completion_column_name=text")
SFT_FILES = (f"{DATASET}={{text_files: '{{folder}}/a.jsonl', {ANSWERS}}}", *LETTERS)
NANOSET = (f"{DATASET}={{dataset_folder: ['{{folder}}/ds/a', '{{folder}}/ds/b']}}",)
TOKENS = (f"{DATASET}={{tokens: '{{folder}}/ds/a'}}",)
RAW = (f"{DATASET}={{tokens: '{{folder}}/raw.bin', token_dtype: uint16}}", "model.model_config.vocab_size=512")
RAMPED = (  # 4, 8 and 16 samples in the first three steps
    "tokens.batch_accumulation_per_replica=6",
    "data_stages.0.batch_size_ramp={start: 4, increment: 4, samples: 20}",
)
HELD_OUT = (*TEXT, "tokens.val_fraction=0.1", "tokens.val_check_interval=3", "tokens.limit_val_batches=-1")
MASKED = "model.document_masking=true"
CAPS = f"{DATASET}.dataset_max_tokens=[100, 100]"
COPIES = f"{DATASET}.dataset_read_path=['{{folder}}/ds/b', '{{folder}}/ds/b']"
DATASTATES = ("checkpoints.checkpointing_engine=datastates",)
EARLIER = ("checkpoints.resume_checkpoint_path={folder}/earlier/checkpoints/2",)
SGD = (f"{FACTORY}={{name: sgd, momentum: 0.5}}",)
RMSPROP = (f"{FACTORY}={{name: torch.optim.RMSprop}}",)
MUON = (f"{FACTORY}={{name: muon, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-8}}",)
DECAY = (SCHEDULE + "lr_decay_style=linear", SCHEDULE + "min_decay_lr=0.001", "tokens.train_steps=5")
IN_STEPS = (SCHEDULE + "lr_decay_style=step", SCHEDULE + "lr_step_size=1", "tokens.train_steps=5")
NORMS = "optimizer.param_groups=[{pattern: norm, learning_rate_scale: 0.5}]"
UNDECAYED = "optimizer.weight_decay_exclude_named_params=['.*norm.*']"
POISON = "general.hooks=[{path: support.user_parts.Poison, kwargs: {steps: [2]}}]"
PROFILER = (
    "tokens.train_steps=5",
    "profiler={profiler_export_path: '{here}/traces', skip_first: 0, wait: 0, warmup: 1, active: 1, with_stack: false}",
)


def mixture(first: str, second: str, weights: tuple[int, int] = (1, 1)) -> str:
    parts = [f"{{weight: {weight}, {part}}}" for weight, part in zip(weights, (first, second))]
    return f"{DATASET}={{mixture: [{', '.join(parts)}]}}"


def two_stages(second: str) -> tuple[str]:
    """Of random tokens, from steps 1 and 3 on; `second` is a key of the other's data."""
    late = f"{{name: b, start_training_step: 3, data: {{dataset: null, {second}}}}}"
    return (f"data_stages=[{{name: a, start_training_step: 1, data: {{dataset: null}}}}, {late}]",)


def share(part: str, *more: str) -> Row:
    """The weight of `part` in a mixture, from 1:1 to 3:1."""
    return Row(tokens, mixture(part, UP, (3, 1)), (mixture(part, UP), *more))


def limit(base: tuple[str, ...], epochs: float = 0.02) -> Row:
    """A run of three steps ends when a small part of an epoch is read."""
    return Row(steps, f"{DATASET}.max_epochs={epochs}", base)


ROWS: dict[str, Row] = {
    # ---- general, parallelism ----
    "General.project": Row(printed_config, "general.project=other"),
    "General.run": Row(files, "general.run=other"),
    "General.seed": Row(initial_weights, "general.seed=8"),
    "General.hooks": Row(metric("skipped"), POISON),
    "Hook.path": Row(metric("skipped"), POISON, ("general.hooks=[{path: support.user_parts.Spy}]",)),
    "Hook.kwargs": Row(metric("skipped"), POISON.replace("2", "3"), (POISON,)),
    "General.benchmark_csv_path": Row(files, "general.benchmark_csv_path={here}/benchmark.csv"),
    "General.ignore_sanity_checks": Row(messages, "general.ignore_sanity_checks=false"),
    "General.deterministic": Row(lambda o: "Deterministic algorithms" in o.said, "general.deterministic=true"),
    "Parallelism.recompute_layer": Row(recomputes, "parallelism.recompute_layer=true"),
    # ---- model ----
    "DecoderArchitecture.eos_token_id": Row(
        tokens, ARCHITECTURE + "eos_token_id=3", ("tokenizer.tokenizer_name_or_path={folder}/words", *TEXT[::2])
    ),
    "DecoderArchitecture.hidden_act": Row(first_loss, ARCHITECTURE + "hidden_act=gelu"),
    "DecoderArchitecture.hidden_size": Row(first_loss, ARCHITECTURE + "hidden_size=32"),
    "AttentionArchitecture.intermediate_size": Row(first_loss, ARCHITECTURE + "intermediate_size=32"),
    "AttentionArchitecture._attn_implementation": Row(attention, ARCHITECTURE + "_attn_implementation=eager"),
    "AttentionArchitecture.num_attention_heads": Row(first_loss, ARCHITECTURE + "num_attention_heads=2"),
    "DecoderArchitecture.num_hidden_layers": Row(first_loss, ARCHITECTURE + "num_hidden_layers=3"),
    "LlamaArchitecture.attention_bias": Row(initial_names, ARCHITECTURE + "attention_bias=true"),
    "AttentionArchitecture.num_key_value_heads": Row(first_loss, ARCHITECTURE + "num_key_value_heads=1"),
    "LlamaStyleArchitecture.rms_norm_eps": Row(first_loss, ARCHITECTURE + "rms_norm_eps=0.01"),
    "RopeArchitecture.rope_scaling": Row(first_loss, ARCHITECTURE + "rope_scaling={rope_type: linear, factor: 4.0}"),
    "RopeArchitecture.rope_theta": Row(first_loss, ARCHITECTURE + "rope_theta=10.0"),
    "RopeArchitecture.rope_interleaved": Row(first_loss, ARCHITECTURE + "rope_interleaved=true"),
    "RopeArchitecture.head_dim": Row(first_loss, ARCHITECTURE + "head_dim=8"),
    "DecoderArchitecture.tie_word_embeddings": Row(first_loss, ARCHITECTURE + "tie_word_embeddings=true"),
    "DecoderArchitecture.vocab_size": Row(first_loss, ARCHITECTURE + "vocab_size=80"),
    "DecoderArchitecture.z_loss_enabled": Row(final_weights, ARCHITECTURE + "z_loss_enabled=true"),
    "DecoderArchitecture.z_loss_coefficient": Row(
        metric("z_loss"), ARCHITECTURE + "z_loss_coefficient=0.5", (ARCHITECTURE + "z_loss_enabled=true",)
    ),
    "HFArchitecture.hf": Row(first_loss, "model.model_config={hf: '{folder}/hf'}", (ARCHITECTURE + "hidden_size=32",)),
    "RandomInit.std": Row(initial_weights, "model.init_method.std=0.1"),
    "RandomInit.scaling_method": Row(initial_weights, "model.init_method.scaling_method=NONE"),
    "ExistingCheckpointInit.path": Row(initial_weights, "model.init_method={path: '{folder}/hf'}"),
    "Model.model_config": Row(first_loss, ARCHITECTURE + "hidden_size=32"),
    "Model.init_method": Row(initial_weights, "model.init_method.std=0.1"),
    "Model.dtype": Row(first_loss, "model.dtype=bfloat16"),
    "Model.make_vocab_size_divisible_by": Row(rows_in_memory, "model.make_vocab_size_divisible_by=48"),
    "Model.loss": Row(first_loss, "model.loss=support.user_parts.smoothed"),
    "Model.document_masking": Row(first_loss, MASKED, TEXT),
    # ---- tokenizer ----
    "Tokenizer.tokenizer_name_or_path": Row(tokens, ("tokenizer={tokenizer_name_or_path: '{folder}/words'}",), TEXT),
    "Tokenizer.tokenizer_max_length": Row(tokens, "tokenizer.tokenizer_max_length=5", TEXT),
    "Tokenizer.train": Row(tokens, "tokenizer.train.vocab_size=280", TEXT),
    "TokenizerTraining.vocab_size": Row(tokens, "tokenizer.train.vocab_size=280", TEXT),
    # ---- checkpoints ----
    "Checkpoints.checkpoints_path": Row(files, "checkpoints.checkpoints_path={here}/checkpoints/below"),
    "Checkpoints.checkpoint_interval": Row(checkpoints, "checkpoints.checkpoint_interval=2"),
    "Checkpoints.save_initial_state": Row(checkpoints, "checkpoints.save_initial_state=false"),
    "Checkpoints.save_final_state": Row(checkpoints, "checkpoints.save_final_state=false"),
    "Checkpoints.resume_checkpoint_path": Row(steps, EARLIER),
    "Checkpoints.load_mode": Row(steps, "checkpoints.load_mode=transfer", EARLIER),
    "Checkpoints.load_lr_scheduler": Row(steps, "checkpoints.load_lr_scheduler=false", EARLIER),
    "Checkpoints.load_optimizer": Row(final_weights, "checkpoints.load_optimizer=false", EARLIER),
    "Checkpoints.keep_last": Row(checkpoints, WORSE[1], WORSE[:1]),
    "Checkpoints.keep_every": Row(checkpoints, "checkpoints.keep_every=2", WORSE[:2]),
    "Checkpoints.keep_best": Row(checkpoints, "checkpoints.keep_best=true", WORSE),
    "Checkpoints.export_hf": Row(files, "checkpoints.export_hf=true"),
    "Checkpoints.checkpointing_engine": Row(engine, "checkpoints.checkpointing_engine=async"),
    "Checkpoints.datastates": Row(engine, "checkpoints.datastates.parser_threads=3", DATASTATES),
    "Checkpoints.writer": Row(engine, "checkpoints.writer=support.user_parts.open_file"),
    "DataStates.host_cache_size": Row(engine, "checkpoints.datastates.host_cache_size=0.00001", DATASTATES),
    "DataStates.parser_threads": Row(engine, "checkpoints.datastates.parser_threads=3", DATASTATES),
    "DataStates.pin_host_cache": Row(engine, "checkpoints.datastates.pin_host_cache=false", DATASTATES),
    # ---- logging ----
    "Logging.log_level": Row(messages, "logging.log_level=warning"),
    "Logging.format": Row(messages, "logging.format=nanotron"),
    "Logging.iteration_step_info_interval": Row(messages, "logging.iteration_step_info_interval=2", DECAY),
    "Logging.log_dir": Row(files, "logging.log_dir={here}/logs/below"),
    "Logging.state_hash": Row(metric("state_hash"), "logging.state_hash=false"),
    "Logging.expert_loads": Row(metric("expert_load/0/0"), "logging.expert_loads=true", EXPERTS),
    "Logging.tensorboard": Row(files, "logging.tensorboard=true"),
    "Logging.sample_prompts": Row(messages, 'logging.sample_prompts=["The sum"]', TEXT),
    # ---- tokens ----
    "Tokens.sequence_length": Row(tokens, "tokens.sequence_length=8"),
    "Tokens.train_steps": Row(steps, "tokens.train_steps=4"),
    "Tokens.micro_batch_size": Row(micro_batches, "tokens.micro_batch_size=2"),
    "Tokens.batch_accumulation_per_replica": Row(micro_batches, "tokens.batch_accumulation_per_replica=2"),
    "Tokens.val_check_interval": Row(metric("val_loss"), "tokens.val_check_interval=2", VALIDATION),
    "Tokens.val_check_unit": Row(metric("val_loss"), "tokens.val_check_unit=tokens", VALIDATION),
    "Tokens.limit_val_batches": Row(metric("val_tokens"), "tokens.limit_val_batches=2", VALIDATION),
    "Tokens.val_samples": Row(metric("val_tokens"), "tokens.val_samples=3", VALIDATION),
    "Tokens.val_datasets": Row(metric("val_loss"), OWN_VALIDATION, VALIDATION),
    "Tokens.limit_test_batches": Row(metric("test_tokens"), "tokens.limit_test_batches=2", TEST),
    "Tokens.test_datasets": Row(metric("test_loss"), TEST[0].replace("counting", "counting_down"), TEST),
    "Tokens.val_fraction": Row(metric("val_tokens"), "tokens.val_fraction=0.5", HELD_OUT),
    # ---- optimizer ----
    "Optimizer.optimizer_factory": Row(final_weights, f"{FACTORY}={{name: sgd}}"),
    "AdamW.adam_eps": Row(final_weights, f"{FACTORY}.adam_eps=0.01"),
    "AdamW.adam_beta1": Row(final_weights, f"{FACTORY}.adam_beta1=0.5"),
    "AdamW.adam_beta2": Row(final_weights, f"{FACTORY}.adam_beta2=0.5"),
    "AdamW.torch_adam_is_fused": Row(fused, f"{FACTORY}.torch_adam_is_fused=false"),
    "AdamW.name": Row(final_weights, f"{FACTORY}={{name: adamW}}", SGD),
    "SGD.name": Row(final_weights, SGD),
    "SGD.momentum": Row(final_weights, f"{FACTORY}.momentum=0.9", SGD),
    "SGD.nesterov": Row(final_weights, f"{FACTORY}.nesterov=true", SGD),
    "Muon.name": Row(final_weights, MUON),
    "Muon.adam_eps": Row(final_weights, f"{FACTORY}.adam_eps=0.01", MUON),
    "Muon.adam_beta1": Row(final_weights, f"{FACTORY}.adam_beta1=0.5", MUON),
    "Muon.adam_beta2": Row(final_weights, f"{FACTORY}.adam_beta2=0.5", MUON),
    "Muon.torch_adam_is_fused": Row(fused, f"{FACTORY}.torch_adam_is_fused=false", MUON),
    "Muon.muon_momentum": Row(final_weights, f"{FACTORY}.muon_momentum=0.5", MUON),
    "Muon.muon_nesterov": Row(final_weights, f"{FACTORY}.muon_nesterov=false", MUON),
    "Muon.muon_ns_steps": Row(final_weights, f"{FACTORY}.muon_ns_steps=2", MUON),
    "Muon.muon_learning_rate_scale": Row(final_weights, f"{FACTORY}.muon_learning_rate_scale=2.0", MUON),
    "CustomOptimizer.name": Row(final_weights, RMSPROP),
    "CustomOptimizer.kwargs": Row(final_weights, f"{FACTORY}.kwargs={{alpha: 0.5}}", RMSPROP),
    "Optimizer.weight_decay": Row(final_weights, "optimizer.weight_decay=0.5"),
    "Optimizer.clip_grad": Row(final_weights, "optimizer.clip_grad=0.01", SGD),
    "Optimizer.learning_rate_scheduler": Row(rates, SCHEDULE + "learning_rate=0.02"),
    "LearningRateScheduler.learning_rate": Row(rates, SCHEDULE + "learning_rate=0.02"),
    "LearningRateScheduler.lr_warmup_steps": Row(rates, SCHEDULE + "lr_warmup_steps=3"),
    "LearningRateScheduler.lr_warmup_style": Row(rates, SCHEDULE + "lr_warmup_style=constant"),
    "LearningRateScheduler.lr_decay_style": Row(rates, SCHEDULE + "lr_decay_style=cosine", DECAY),
    "LearningRateScheduler.lr_decay_steps": Row(rates, SCHEDULE + "lr_decay_steps=2", DECAY),
    "LearningRateScheduler.lr_decay_starting_step": Row(rates, SCHEDULE + "lr_decay_starting_step=3", DECAY),
    "LearningRateScheduler.min_decay_lr": Row(rates, SCHEDULE + "min_decay_lr=0.005", DECAY),
    "LearningRateScheduler.lr_step_size": Row(rates, SCHEDULE + "lr_step_size=2", IN_STEPS),
    "LearningRateScheduler.lr_step_gamma": Row(rates, SCHEDULE + "lr_step_gamma=0.5", IN_STEPS),
    "Optimizer.weight_decay_exclude_named_params": Row(final_weights, UNDECAYED),
    "Optimizer.param_groups": Row(final_weights, NORMS),
    "ParamGroup.pattern": Row(final_weights, NORMS.replace("norm", "mlp"), (NORMS,)),
    "ParamGroup.learning_rate_scale": Row(final_weights, NORMS.replace("0.5", "0.0"), (NORMS,)),
    "ParamGroup.init_std_scale": Row(final_weights, "optimizer.param_groups=[{pattern: mlp, init_std_scale: 0.5}]"),
    "ParamGroup.weight_decay": Row(final_weights, "optimizer.param_groups=[{pattern: norm, weight_decay: 0.0}]"),
    # ---- data ----
    "DataStage.name": Row(messages, "data_stages.0.name=other"),
    "DataStage.start_training_step": Row(tokens, "data_stages.1.start_training_step=2", two_stages("seed: 9")),
    "DataStage.sequence_length": Row(tokens, "data_stages.0.sequence_length=8"),
    "DataStage.batch_size_ramp": Row(micro_batches, RAMPED[-1], RAMPED[:-1]),
    "BatchSizeRamp.start": Row(metric("global_batch_size"), "data_stages.0.batch_size_ramp.start=8", RAMPED),
    "BatchSizeRamp.increment": Row(metric("global_batch_size"), "data_stages.0.batch_size_ramp.increment=20", RAMPED),
    "BatchSizeRamp.samples": Row(metric("global_batch_size"), "data_stages.0.batch_size_ramp.samples=30", RAMPED),
    "DataStage.data": Row(tokens, "data_stages.0.data.seed=4"),
    "Data.dataset": Row(tokens, USER),
    "Data.seed": Row(tokens, "data_stages.0.data.seed=4"),
    "Data.temperature": Row(tokens, "data_stages.0.data.temperature=5.0", (mixture(UP, DOWN, (9, 1)),)),
    "Data.when_exhausted": Row(steps, "data_stages.0.data.when_exhausted=repeat", limit(TOKENS).changed),
    "Data.restart": Row(tokens, "data_stages.1.data.restart=true", two_stages("seed: 42")),
    "PretrainDataset.hf_dataset_or_datasets": Row(tokens, f"{DATASET}.hf_dataset_or_datasets={{folder}}/rows2", HUB),
    "PretrainDataset.hf_dataset_splits": Row(tokens, f"{DATASET}.hf_dataset_splits=test", HUB),
    "PretrainDataset.text_column_name": Row(tokens, f"{DATASET}.text_column_name=other", HUB),
    "PretrainDataset.packing": Row(tokens, f"{DATASET}.packing=best_fit", HUB),
    "PretrainDataset.weight": share("hf_dataset_or_datasets: '{folder}/rows'", *TEXT[1:]),
    "PretrainDataset.max_epochs": limit(HUB),
    "TextFiles.text_files": Row(tokens, f"{DATASET}.text_files={{folder}}/b.jsonl", TEXT),
    "TextFiles.text_column_name": Row(tokens, f"{DATASET}.text_column_name=other", TEXT),
    "TextFiles.packing": Row(tokens, f"{DATASET}.packing=best_fit", TEXT),
    "TextFiles.streaming": Row(tokens, STREAM[-1], TEXT),
    "EmbeddedCorpus.streaming": Row(tokens, STREAM[-1], (f"{DATASET}={{corpus: python-stdlib}}", *TEXT[1:])),
    "PretrainDataset.streaming": Row(tokens, STREAM[-1], HUB),
    "Streaming.shuffle_buffer": Row(tokens, f"{DATASET}.streaming.shuffle_buffer=30", STREAM),
    "Streaming.reader_shards": Row(tokens, f"{DATASET}.streaming.reader_shards=2", STREAMS),
    "TextFiles.weight": share("text_files: '{folder}/a.jsonl'", *TEXT[1:]),
    "TextFiles.max_epochs": limit(TEXT),
    "SFTDataset.max_epochs": limit(SFT, 0.05),
    "SFTFiles.max_epochs": limit(SFT_FILES, 0.05),
    "SFTDataset.hf_dataset_or_datasets": Row(tokens, f"{DATASET}.hf_dataset_or_datasets={{folder}}/rows2", SFT),
    "SFTDataset.hf_dataset_splits": Row(tokens, SFT_TEST, SFT),
    "SFTDataset.weight": share(f"hf_dataset_or_datasets: '{{folder}}/rows', {ANSWERS}", *LETTERS),
    "SFTDataset.sft_dataloader": Row(tokens, SFT, (HUB[0], *LETTERS)),
    "SFTDataset.debug_max_samples": Row(tokens, f"{DATASET}.debug_max_samples=40", SFT),
    "SFTDataset.prompt_column_name": Row(tokens, f"{DATASET}.prompt_column_name=other", SFT),
    "SFTDataset.completion_column_name": Row(tokens, f"{DATASET}.completion_column_name=text", SFT),
    "SFTDataset.packing": Row(tokens, f"{DATASET}.packing=windows", SFT),
    "SFTFiles.text_files": Row(tokens, f"{DATASET}.text_files={{folder}}/b.jsonl", SFT_FILES),
    "SFTFiles.weight": share(f"text_files: '{{folder}}/a.jsonl', {ANSWERS}", *LETTERS),
    "SFTFiles.sft_dataloader": Row(tokens, SFT_FILES, (TEXT[0], *LETTERS)),
    "SFTFiles.debug_max_samples": Row(tokens, f"{DATASET}.debug_max_samples=40", SFT_FILES),
    "SFTFiles.prompt_column_name": Row(tokens, f"{DATASET}.prompt_column_name=other", SFT_FILES),
    "SFTFiles.completion_column_name": Row(tokens, f"{DATASET}.completion_column_name=text", SFT_FILES),
    "SFTFiles.packing": Row(tokens, f"{DATASET}.packing=windows", SFT_FILES),
    "NanosetDataset.dataset_folder": Row(tokens, f"{DATASET}.dataset_folder={{folder}}/ds/b", NANOSET),
    "NanosetDataset.dataset_weights": Row(tokens, f"{DATASET}.dataset_weights=[1, 5]", NANOSET),
    "NanosetDataset.dataset_read_path": Row(tokens, COPIES, NANOSET),
    "NanosetDataset.tokenizer_name": Row(warnings, f"{DATASET}.tokenizer_name=another", (*NANOSET, *WORDS)),
    "NanosetDataset.return_positions": Row(first_loss, f"{DATASET}.return_positions=false", (*NANOSET, MASKED)),
    "NanosetDataset.dataset_max_tokens": Row(tokens, CAPS, NANOSET),
    "NanosetDataset.shuffle_files": Row(tokens, f"{DATASET}.shuffle_files=true", (*NANOSET, CAPS)),
    "NanosetDataset.packing": Row(tokens, f"{DATASET}.packing=best_fit", NANOSET),
    "NanosetDataset.weight": share("dataset_folder: '{folder}/ds/a'"),
    "NanosetDataset.max_epochs": limit(NANOSET),
    "TokenFilesDataset.tokens": Row(tokens, f"{DATASET}.tokens={{folder}}/ds/b", TOKENS),
    "TokenFilesDataset.token_dtype": Row(tokens, f"{DATASET}.token_dtype=uint8", RAW),
    "TokenFilesDataset.packing": Row(tokens, f"{DATASET}.packing=best_fit", TOKENS),
    "TokenFilesDataset.weight": share("tokens: '{folder}/ds/a'"),
    "TokenFilesDataset.max_epochs": limit(TOKENS),
    "CustomSource.source": Row(tokens, f"{DATASET}.source=support.user_parts.counting_down", USER),
    "CustomSource.kwargs": Row(tokens, f"{DATASET}.kwargs={{start: 5}}", USER),
    "CustomSource.weight": share(DOWN),
    "CustomSource.max_epochs": limit(USER, 0.005),
    "MixtureDataset.mixture": Row(tokens, mixture(UP, DOWN), USER),
    # ---- profiler ----
    "Profiler.profiler_export_path": Row(files, "profiler.profiler_export_path={here}/elsewhere", PROFILER),
    "Profiler.wait": Row(trace_steps, "profiler.wait=1", PROFILER),
    "Profiler.warmup": Row(trace_steps, "profiler.warmup=2", PROFILER),
    "Profiler.active": Row(trace_steps, "profiler.active=2", PROFILER),
    "Profiler.repeat": Row(trace_steps, "profiler.repeat=2", PROFILER),
    "Profiler.skip_first": Row(trace_steps, "profiler.skip_first=1", PROFILER),
    "Profiler.record_shapes": Row(trace_arguments, "profiler.record_shapes=true", PROFILER),
    "Profiler.profile_memory": Row(trace_allocations, "profiler.profile_memory=true", PROFILER),
    "Profiler.with_stack": Row(trace_arguments, "profiler.with_stack=true", PROFILER),
    "Profiler.export_chrome_trace": Row(files, "profiler.export_chrome_trace=true", PROFILER),
}

# Tests of their own in test_every_key.py, and one in another file: what they change is no number of a short run.
OWN_TESTS = {
    "test_remote_tokens.py": "Config.remote_data RemoteData.cache_folder RemoteData.cache_gb",
    "test_remote_failures.py": "RemoteData.tries",
    "test_local_ranks.py": "Logging.log_level_replica",
    "test_console_and_metrics.py": "General.kill_switch_path",
    "test_trackers.py": "Logging.wandb Logging.trackio",
    "test_every_key.py": """
        Model.compile Data.num_loading_workers Tokenizer.tokenizer_revision
        PretrainDataset.hf_dataset_config_name PretrainDataset.dataset_processing_num_proc_per_process
        PretrainDataset.dataset_overwrite_cache SFTDataset.hf_dataset_config_name EmbeddedCorpus.corpus
        EmbeddedCorpus.packing EmbeddedCorpus.weight EmbeddedCorpus.max_epochs Optimizer.accumulate_grad_in_fp32""",
    "test_bad_documents.py": "PretrainDataset.on_bad_document TextFiles.on_bad_document",
    "test_sft.py": """SFTDataset.dataset_processing_num_proc_per_process SFTDataset.dataset_overwrite_cache
        SFTDataset.messages_column_name SFTFiles.messages_column_name""",
    "test_token_folders_bad_input.py": "NanosetDataset.vocab_size",
    "test_token_folders.py": """NanosetDataset.token_size_in_bytes NanosetDataset.skip_in_stream
        NanosetDataset.pad_samples_to_global_batch_size NanosetDataset.use_old_brrr_dataloader""",
    "test_local_checkpoints.py": "Checkpoints.local LocalCheckpoints.path LocalCheckpoints.interval",
    "test_shared_folder.py": "Checkpoints.checkpoints_path_is_shared_file_system",
    "test_uploads.py": """
        Checkpoints.staging_path Checkpoints.remove_after_upload S3Upload.upload_s3_path S3Upload.remove_after_upload
        S3Upload.s5cmd_numworkers S3Upload.s5cmd_concurrency S3Upload.s5cmd_path""",
    "test_products.py": "Model.kernels",
    "test_nonfinite_steps.py": "Optimizer.skip_nonfinite_steps",
    "test_nonfinite_cause.py": "Profiler.detect_anomaly",
    "test_spikes.py": "Optimizer.spikes Spikes.z_score Spikes.window Spikes.snapshot_every Spikes.max_rollbacks",
    "test_bf16_weights.py": "Optimizer.stochastic_rounding",
    "test_experts_on_layouts.py": "Parallelism.expert_parallel_size",
    "test_matrix.py": "Parallelism.dp Parallelism.pp Parallelism.tp Parallelism.context_parallel_size",
    "test_data_parallel.py": "Parallelism.dp_shard Parallelism.cpu_offload",
    "test_pipeline.py": "Parallelism.pp_stages_per_rank Parallelism.pp_layers",
    "test_failing_ranks.py": "Parallelism.timeout_seconds",
}
OWN = {key: test for test, keys in OWN_TESTS.items() for key in keys.split()} | family_keys.OWN

# Sections: what their keys do is what they do.
SECTIONS = """Config.metrics_logging Config.evaluation Config.general Config.parallelism Config.model Config.tokenizer
    Config.checkpoints Config.logging Config.tokens Config.optimizer Config.data_stages Config.profiler
    Config.s3_upload Config.doremi"""
