"""What the schema knows and no code serves yet: refused by name, never ignored.

Each rule yields what is asked for; a capability that arrives takes its line out.
"""

from __future__ import annotations

from collections.abc import Iterator

from kenotron.config.architecture import ACTIVATIONS, HFArchitecture, LlamaArchitecture
from kenotron.config.config import Config
from kenotron.config.errors import NotSupportedYet, nearest
from kenotron.config.model import TRAINING_DTYPES, RandomInit, SpectralMupInit


def refuse_unsupported(config: Config) -> None:
    """Raise NotSupportedYet that names everything in `config` that would otherwise have no effect."""
    found = [*_layout(config), *_model(config), *_sections(config)]
    if found:
        raise NotSupportedYet("; ".join(found))


def _layout(config: Config) -> Iterator[str]:
    if config.parallelism.expert_parallel_size > 1:
        yield f"parallelism.expert_parallel_size: {config.parallelism.expert_parallel_size}"


def _model(config: Config) -> Iterator[str]:
    model, architecture = config.model, config.model.architecture
    if isinstance(architecture, LlamaArchitecture | HFArchitecture):
        values = architecture.model_dump(by_alias=True)
        attention, act = values.get("_attn_implementation", "sdpa"), values.get("hidden_act", "silu")
        if attention not in ("flash_attention_2", "sdpa"):
            yield f"model.model_config._attn_implementation: {attention}"
        if act not in ACTIVATIONS:
            yield f"model.model_config.hidden_act: {act}{nearest(act, ACTIVATIONS)}"
    else:
        yield f"model.model_config of the family {type(architecture).__name__.removesuffix('Architecture')}"
    init = model.init_method
    if isinstance(init, SpectralMupInit):
        yield "model.init_method.use_mup"
    if isinstance(init, RandomInit) and init.scaling_method in ("LAYER_INDEX", "MODEL_SCALE"):
        yield f"model.init_method.scaling_method: {init.scaling_method}"
    if model.dtype not in TRAINING_DTYPES:
        yield f"model.dtype: {model.dtype}"
    if model.dtype == "bfloat16" and not config.optimizer.accumulate_grad_in_fp32:
        yield "optimizer.accumulate_grad_in_fp32: false with model.dtype: bfloat16"


def _sections(config: Config) -> Iterator[str]:
    if config.general.benchmark_csv_path:
        yield "general.benchmark_csv_path"
    checkpoints = config.checkpoints
    if checkpoints.checkpointing_engine != "TORCH":
        yield f"checkpoints.checkpointing_engine: {checkpoints.checkpointing_engine.lower()}"
    if checkpoints.datastates:
        yield "checkpoints.datastates"
    for name in ("resume_checkpoint_path", "checkpoints_path"):
        if str(getattr(checkpoints, name)).startswith("s3:"):
            yield f"checkpoints.{name} on s3"
    if config.metrics_logging.log_level:
        yield "metrics_logging.log_level: 1"
    if config.tokens.limit_test_batches:
        yield f"tokens.limit_test_batches: {config.tokens.limit_test_batches}"
    if config.lighteval:
        yield "lighteval"
    if config.s3_upload:
        yield "s3_upload"
