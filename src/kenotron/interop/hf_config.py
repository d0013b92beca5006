"""Hugging Face's `config.json` and our `model.model_config`, one into the other.

Most keys have one name in both. What differs:

    transformers 5      rope_parameters: {rope_theta: 500000.0, rope_type: llama3, factor: 8.0, …}
    transformers 4      rope_theta: 500000.0   rope_scaling: {rope_type: llama3, factor: 8.0, …}   (older: type)
    ours                rope_theta: 500000.0   rope_scaling: {rope_type: llama3, factor: 8.0, …}

What our maths does not compute is refused by name, never dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kenotron.config.architecture import ACTIVATIONS, ROPE_KEYS, LlamaArchitecture, odd_head_dim
from kenotron.config.errors import InputError, NotSupportedYet

Report = Callable[[str], None]

SAME_NAME = (
    "attention_bias",
    "bos_token_id",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "pretraining_tp",
    "rms_norm_eps",
    "tie_word_embeddings",
    "use_cache",
    "vocab_size",
)
# Keys that transformers writes beside rules that do not read them.
ROPE_UNREAD = {
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"original_max_position_embeddings"},
    "dynamic": {"original_max_position_embeddings"},
    "llama3": set(),
    "yarn": {"finetuned"},
}


def quiet(line: str) -> None:
    """A `Report` for callers that do not want one."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from `file`, or InputError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def architecture_from_hf(
    config: Mapping[str, Any], where: str, report: Report = quiet, overrides: Mapping[str, Any] | None = None
) -> LlamaArchitecture:
    """The architecture that a `config.json` describes; `overrides` (our keys) replace its values.

    `where` names the file in errors; `report` gets a line for what was settled by a choice.
    """
    _refuse_foreign(config, where)
    found = {key: config[key] for key in SAME_NAME if config.get(key) is not None}
    found |= {"hidden_act": _activation(config.get("hidden_act", "silu"), where)}
    found |= _rope(config, where)
    eos = config.get("eos_token_id")
    if isinstance(eos, list):
        if len(eos) > 1:
            report(f"{where}: of the eos_token_id {eos} training uses the first, {eos[0]}")
        eos = eos[0] if eos else None
    if eos is not None:
        found["eos_token_id"] = eos
    for key in ("bos_token_id", "eos_token_id"):
        if key in config and found.get(key) is None:
            report(f"{where}: {key} is null; {LlamaArchitecture.model_fields[key].default} is written in its place")
    if config.get("attention_dropout"):
        report(f"{where}: attention_dropout {config['attention_dropout']} is left out: training here has no dropout")
    try:
        architecture = LlamaArchitecture.model_validate(found | dict(overrides or {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where}: {key}: {first['msg']}, found {first['input']!r}") from None
    _check_heads(architecture, where)
    return architecture


def _check_heads(architecture: LlamaArchitecture, where: str) -> None:
    """What the config checks of shapes that stand in it."""
    width, heads, kv = architecture.hidden_size, architecture.num_attention_heads, architecture.kv_heads
    if width % heads:
        raise InputError(f"{where}: num_attention_heads: expected a divisor of hidden_size {width}, found {heads}")
    if heads % kv:
        raise InputError(f"{where}: num_key_value_heads: expected a divisor of num_attention_heads {heads}, found {kv}")
    if problem := odd_head_dim(width, heads):
        raise InputError(f"{where}: hidden_size: {problem}")


def _refuse_foreign(config: Mapping[str, Any], where: str) -> None:
    """NotSupportedYet for what would load and then compute something else."""
    kind, names = config.get("model_type"), config.get("architectures") or ["LlamaForCausalLM"]
    if kind != "llama" or "LlamaForCausalLM" not in names:
        found = kind if kind != "llama" else ", ".join(names)
        raise NotSupportedYet(f"{where}: model family {found!r} (there is llama, LlamaForCausalLM)")
    if config.get("mlp_bias"):
        raise NotSupportedYet(f"{where}: mlp_bias: true")
    if config.get("quantization_config"):
        raise NotSupportedYet(f"{where}: quantized weights (quantization_config)")
    for key in ("hidden_size", "num_attention_heads"):
        if not isinstance(config.get(key), int):
            raise InputError(f"{where}: {key}: expected a whole number, found {config.get(key)!r}")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("head_dim") not in (None, width // heads):
        raise NotSupportedYet(
            f"{where}: head_dim {config['head_dim']}, other than hidden_size / num_attention_heads = {width // heads}"
        )


def _activation(name: str, where: str) -> str:
    if name not in ACTIVATIONS:
        raise NotSupportedYet(f"{where}: hidden_act {name!r} (there are {', '.join(ACTIVATIONS)})")
    return name


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` from either form."""
    rope = {k: v for k, v in (config.get("rope_scaling") or {}).items() if v is not None}
    rope |= {k: v for k, v in (config.get("rope_parameters") or {}).items() if v is not None}
    theta = rope.pop("rope_theta", config.get("rope_theta")) or 10000.0
    old_name = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_name)
    if kind not in ROPE_KEYS:
        raise NotSupportedYet(f"{where}: rope_type {kind!r} (there are {', '.join(ROPE_KEYS)})")
    if rope.pop("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise NotSupportedYet(f"{where}: partial_rotary_factor other than 1")
    scaling = {"rope_type": kind} | {k: v for k, v in rope.items() if k not in ROPE_UNREAD[kind]}
    return {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else scaling}


def hf_config(architecture: LlamaArchitecture, dtype: str, eos_token_id: int | list[int]) -> Any:
    """The same as a `transformers.LlamaConfig` of the installed version, which knows how it is written."""
    from transformers import LlamaConfig
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        values = {key: getattr(architecture, key) for key in SAME_NAME}
        values["num_key_value_heads"] = architecture.kv_heads
        rope = _rope_for(LlamaConfig, architecture)
        return LlamaConfig(
            **values,
            **rope,
            hidden_act=architecture.hidden_act,
            eos_token_id=eos_token_id,
            dtype=dtype,
            architectures=["LlamaForCausalLM"],
        )
    finally:
        logging.set_verbosity(verbosity)


def _rope_for(config_class: Any, architecture: LlamaArchitecture) -> dict[str, Any]:
    scaling = dict(architecture.rope_scaling or {})
    if "type" in scaling:
        scaling = {"rope_type": scaling.pop("type")} | scaling
    if not hasattr(config_class(), "rope_parameters"):  # before transformers 5
        return {"rope_theta": architecture.rope_theta, "rope_scaling": scaling or None}
    return {"rope_parameters": {"rope_type": "default"} | scaling | {"rope_theta": architecture.rope_theta}}
