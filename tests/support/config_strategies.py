"""Random valid configs, drawn from the schema itself: a new key is drawn without a line here.

Every field gets values of its type within its bounds. What two fields must agree on, which the types cannot say, is
put right afterwards, key by key, in `_agree` and the small functions below it.
"""

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from kenotron.config import Config
from kenotron.config.architecture import Architecture, HFArchitecture, architecture_variants
from kenotron.config.optimizer import CustomOptimizer
from kenotron.config.schema import fields
from kenotron.config.section import Section
from kenotron.models.families.llama import LlamaArchitecture

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)
TRICKY = ["1e-5", "null", "~", "yes", "12:30:00", "2026-01-01", "010", "0x1f", "a: b", "- c", "# d", "é\u2028", "\x85"]
tricky = st.sampled_from([*TRICKY, "\ufeff", "a\nb", " x ", "<<"])
words = text | tricky
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


NOT_OF_STREAMS = ("packing", "max_epochs", "dataset_processing_num_proc_per_process", "dataset_overwrite_cache")


def configs() -> st.SearchStrategy[Config]:
    """Valid configs over the whole schema, variants that no code serves yet included."""
    return _section(Config).map(_agree).map(Config.model_validate)


def _section(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    if section is HFArchitecture:
        llama = {name: _field(section, name, field) for name, field in fields(LlamaArchitecture)}
        return st.fixed_dictionaries({"hf": words}, optional=llama)
    required, optional = {}, {}
    for name, field in fields(section):
        deciding = field.is_required() or name.startswith("is_") or name in ("sft_dataloader", "name")
        (required if deciding else optional)[name] = _field(section, name, field)
    return st.fixed_dictionaries(required, optional=optional)


def _field(section: type[Section], name: str, field: Any) -> st.SearchStrategy[Any]:
    if name == "family":
        return st.just(get_args(field.annotation)[0] if get_origin(field.annotation) is Literal else "llama")
    if name == "lr_decay_style":
        return st.sampled_from(["linear", "cosine", "1-sqrt", "sqrt", "constant", "step", "my.schedules.decay"])
    if name == "loss":
        return st.none()
    if name == "run":  # a folder inside logging.log_dir
        return words.filter(lambda run: not run.startswith(("/", "~")) and ".." not in run and "\0" not in run)
    if name == "hybrid_override_pattern":  # four layers, as in `_heads`
        return st.text("M*-", min_size=4, max_size=4)
    if name == "rope_scaling":
        return st.none() | st.just({"rope_type": "linear", "factor": 2.0})
    if name in ("pattern", "weight_decay_exclude_named_params"):
        regex = st.sampled_from([".*norm.*", r"model\.embed_tokens", "a|b"])
        return regex if name == "pattern" else st.none() | st.lists(regex, max_size=2)
    if name in ("val_datasets", "test_datasets"):  # most keys of a dataset are refused there
        return st.none() | st.just([{"text_files": "a"}, {"tokens": ["b", "c"]}])
    if name == "val_check_interval":
        return st.just(-1) | st.integers(1, 1000)
    if section is CustomOptimizer and name == "name":
        return st.sampled_from(["torch.optim.Adagrad", "my.optimizers.Lion"])
    return _value(field.annotation, _bounds(field.metadata))


def _bounds(rules: list[Any]) -> dict[str, Any]:
    names = ("ge", "gt", "le", "lt", "min_length")
    return {name: getattr(rule, name) for rule in rules for name in names if getattr(rule, name, None) is not None}


def _value(kind: Any, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind is Architecture:
        return _value(architecture_variants(), bounds)
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *metadata = get_args(kind)
        rules = [rule for field in metadata if isinstance(field, FieldInfo) for rule in field.metadata]
        return _value(inner, bounds | _bounds(rules))
    if origin in (Union, UnionType):
        return st.one_of([_value(each, bounds) for each in get_args(kind)])
    if origin is Literal:
        return st.sampled_from(get_args(kind))
    if origin is list:
        return st.lists(_value(get_args(kind)[0], {}), min_size=bounds.get("min_length", 0), max_size=3)
    if origin is dict:
        least = bounds.get("min_length", 0)
        return st.dictionaries(words, _value(get_args(kind)[1], {}), min_size=least, max_size=3)
    if isinstance(kind, type) and issubclass(kind, Section):
        return st.deferred(lambda: _section(kind))
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    open_ends: dict[str, Any] = {"exclude_min": "gt" in bounds, "exclude_max": "lt" in bounds}
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        str: words,
        bool: st.booleans(),
        type(None): st.none(),
        Any: plain,
        int: st.integers(-3 if low is None else low, 10_000 if high is None else high),
        float: st.floats(0.0 if low is None else low, 1e9 if high is None else high, allow_nan=False, **open_ends),
    }
    return scalars[kind]


def _agree(config: dict[str, Any]) -> dict[str, Any]:
    """Put right what fields must agree on."""
    _heads(config["model"]["model_config"])
    if "use_mup" in config["model"]["init_method"] or config["model"].get("parametrization"):
        _parametrization(config)
    config.setdefault("parallelism", None)
    if config["parallelism"]:
        _layout(config)
    config["tokenizer"] = {"tokenizer_name_or_path": "some/tokenizer"}
    if config.get("remote_data"):
        config["data_stages"][0]["data"]["dataset"] = {"tokens": ["s3://a/b", "c"]}
    if config.get("doremi"):
        config["doremi"].update(domain_names=["a", "b"], domain_weights=None)
        for stage in config["data_stages"]:
            stage["data"]["dataset"] = {"mixture": [{"tokens": [path], "weight": 1.0} for path in ("s3://a/b", "c")]}
    _stages(config["data_stages"])
    _ramps(config)
    if not config["tokens"].get("test_datasets"):
        config["tokens"]["limit_test_batches"] = 0
    if config["tokens"].get("val_samples"):
        config["tokens"]["limit_val_batches"] = -1
    if config["checkpoints"].get("local"):
        paths = {"checkpoints_path": "a", "staging_path": None, "remove_after_upload": False}
        config["checkpoints"].update(paths, local={"path": "/b/c", "interval": 1}, checkpoint_interval=2)
    if config.get("metrics_logging"):
        config["metrics_logging"]["gradient_noise_scale"] = False
    if config.get("evaluation"):
        config["evaluation"].update(eval_interval=None, ema=False)
    if "path" in config["model"]["init_method"]:
        for group in config["optimizer"].get("param_groups") or ():
            group["init_std_scale"] = 1.0
    if config["checkpoints"].get("staging_path") or config["checkpoints"].get("remove_after_upload"):
        config["checkpoints"]["checkpoints_path"], config["s3_upload"] = "s3://a/b", None
    if config.get("s3_upload"):
        config["s3_upload"]["upload_s3_path"] = "gs://a/b"
    if config["checkpoints"].get("keep_best"):
        config["tokens"].update(limit_val_batches=-1, val_check_interval=1, val_check_unit="steps")
    if config["checkpoints"].get("keep_every") or config["checkpoints"].get("keep_best"):
        config["checkpoints"]["keep_last"] = 2
    if config["checkpoints"].get("datastates"):
        config["checkpoints"]["checkpointing_engine"] = "datastates"
    if config["checkpoints"].get("load_mode", "continue") != "continue":
        config["checkpoints"].update(resume_checkpoint_path="a/b", load_optimizer=True, load_lr_scheduler=True)
    if config["checkpoints"].get("resume_checkpoint_path") == config["checkpoints"]["checkpoints_path"]:
        config["checkpoints"]["resume_checkpoint_path"] = None  # it is left out when a YAML is loaded
    groups = config["optimizer"].get("param_groups") or []
    for one in (config["optimizer"], *groups):
        if one.get("learning_rate_scheduler"):
            _schedule(one["learning_rate_scheduler"])
    if config.get("profiler"):
        config["tokens"]["train_steps"] = 10**10
    config["model"]["dtype"] = "float32"
    if config["optimizer"].get("stochastic_rounding"):
        config["model"]["dtype"] = "bfloat16"
        config["optimizer"].update(accumulate_grad_in_fp32=False, optimizer_factory={"name": "adamW"})
        for group in groups:
            group.pop("optimizer_factory", None)
    return config


_QWEN = {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v3": yaml.safe_load("""{num_key_value_heads: null, qk_rope_head_dim: 8, first_k_dense_replace: 1,
        n_routed_experts: 8, moe_intermediate_size: 32, n_group: 4, topk_group: 2, num_experts_per_tok: 3,
        num_nextn_predict_layers: 0}"""),
    "llamoe": {"moe_num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2} | _QWEN,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2} | _QWEN,
}


def _recurrent(model: dict[str, Any]) -> bool:
    """Whether it is Mamba's or Mamba-2's: without attention."""
    return any(f"is_{name}_config" in model or model.get("family") == name for name in ("mamba", "mamba2"))


def _hybrid(model: dict[str, Any]) -> bool:
    """Whether it has attention beside Mamba-2."""
    return "is_nemotron_h_config" in model or model.get("family") == "nemotron_h"


def _parametrization(config: dict[str, Any]) -> None:
    model, optimizer = config["model"], config["optimizer"]
    optimizer.update(optimizer_factory={"name": "adamW"}, param_groups=None, stochastic_rounding=False)
    model["model_config"]["tie_word_embeddings"] = False
    if chosen := model.get("parametrization"):
        model.update(init_method={"std": 0.02})
        chosen["base_depth"] = 4 if chosen["kind"] == "completep" else None


def _heads(model: dict[str, Any]) -> None:
    if "hf" in model:
        return
    if _recurrent(model):
        model.update(hidden_size=64, num_hidden_layers=4, expand=2, time_step_min=0.001, time_step_max=0.1)
        if "is_mamba2_config" in model or model.get("family") == "mamba2":
            model.update(num_heads=8, head_dim=16, n_groups=2, time_step_limit=[0.0, None])
        return
    model.update(num_attention_heads=4, hidden_size=64, num_hidden_layers=4, num_key_value_heads=2)
    if _hybrid(model):
        model.setdefault("hybrid_override_pattern", "M-M*")
        model.update(n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, mlp_bias=False)
        model.update(moe_intermediate_size=32, moe_shared_expert_intermediate_size=64)
        model.update(mamba_num_heads=8, n_groups=2, time_step_min=0.001, time_step_max=0.1)
    if "is_mistral_config" in model or model.get("family") == "mistral":
        model["sliding_window"] = None
    if "is_starcoder2_config" in model or model.get("family") == "starcoder2":
        model.update(sliding_window=None, multi_query=False)
    if "is_gpt_neox_config" in model or model.get("family") == "gpt_neox":
        model["rotary_pct"] = 0.4  # of 16 channels 6, of 10 channels 4
    for family, sparse in SPARSE.items():
        if f"is_{family}_config" in model or model.get("family") == family:
            model.update(sparse)
    model.pop("_use_doc_masking", None)  # loads as model.document_masking
    if "no_rope_layers" in model:
        model["no_rope_layers"] = [1, 1, 0, 1]
    if model.get("sliding_window_size"):
        model["sliding_window_size"] = None
    if model.get("moe_config"):
        model["moe_config"] = {"num_experts": 4, "top_k": 2, "moe_intermediate_size": 32}
    if model.get("no_rope_layer"):
        model["no_rope_layer"] = 2
    if model.get("head_dim"):
        model["head_dim"] = 10


def _layout(config: dict[str, Any]) -> None:
    """The drawn layout, with degrees that four heads, four layers and a length of 64 divide into."""
    layout = config["parallelism"]
    layout |= {axis: 1 + layout.get(axis, 1) % 2 for axis in ("tp", "pp", "context_parallel_size")}
    layout.update(expert_parallel_size=1, pp_layers=None, pp_stages_per_rank=None, strategy=None)
    layout["dp_shard"] = layout.get("dp", 1)
    config["tokens"].update(sequence_length=64, batch_accumulation_per_replica=8)
    config["optimizer"]["zero_stage"] = 1
    model = config["model"]["model_config"]
    model.pop("moe_expert_capacity_factor", None)  # not with context parallelism
    if _recurrent(model):
        layout["context_parallel_method"] = "state_passing"
        return
    if _hybrid(model):
        layout["context_parallel_method"] = "ulysses"
    elif layout.get("context_parallel_method") == "state_passing":
        layout["context_parallel_method"] = "ring"
    if "hf" not in model:
        model["intermediate_size"] = 128


def _stages(stages: list[dict[str, Any]]) -> None:
    for i, stage in enumerate(stages):
        stage.update(name=f"stage {i}", start_training_step=1 + 7 * (len(stages) - 1 - i))  # not in order
        dataset = stage["data"]["dataset"] or {}
        dataset.pop("weight", None)
        for part in [dataset, *dataset.get("mixture", [])]:
            if "dataset_folder" in part:
                part.update(dataset_weights=None, dataset_read_path=None, dataset_max_tokens=None)
                part["return_positions"] = True
            if part.get("streaming") is not None:
                for name in NOT_OF_STREAMS:
                    part.pop(name, None)
        for part in dataset.get("mixture", []):
            part["weight"] = 2.0
        if not any(part.get("max_epochs") for part in [dataset, *dataset.get("mixture", [])]):
            stage["data"].pop("when_exhausted", None)
        if len(dataset.get("mixture", [])) < 2:
            stage["data"].pop("temperature", None)
            if stage["data"].get("when_exhausted") == "renormalise":
                stage["data"]["when_exhausted"] = "repeat"
    stages[-1]["data"].pop("restart", None)  # the first one in order


def _ramps(config: dict[str, Any]) -> None:
    """Lengths that every layout divides, and ramps that come out: 4 micro-batches, then 8."""
    tokens = config["tokens"]
    at_once = tokens["micro_batch_size"] * (config["parallelism"] or {}).get("dp", 1)
    for stage in config["data_stages"]:
        if stage.get("sequence_length") is not None:
            stage["sequence_length"] = 128
        if stage.get("batch_size_ramp"):
            tokens["batch_accumulation_per_replica"] = 8
            stage["batch_size_ramp"].update(start=4 * at_once, increment=4 * at_once)


def _schedule(schedule: dict[str, Any]) -> None:
    schedule.update(lr_step_size=5)
    if schedule.get("min_decay_lr") is not None:
        schedule["min_decay_lr"] = min(schedule["min_decay_lr"], schedule["learning_rate"])
    if schedule.get("lr_decay_starting_step") is not None:
        warmup = schedule.get("lr_warmup_steps", 0)
        schedule["lr_decay_starting_step"] = max(schedule["lr_decay_starting_step"], warmup)
