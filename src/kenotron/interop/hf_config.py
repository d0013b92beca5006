"""Convert between Hugging Face's `config.json` and Kénotron's `model.model_config`, for any family.

Most keys have one name in both; a family lists the others (`Family.hf_keys`). Rotary positions differ by version:

    transformers 5      rope_parameters: {rope_theta: 500000.0, rope_type: llama3, factor: 8.0, …}
    transformers 4      rope_theta: 500000.0   rope_scaling: {rope_type: llama3, factor: 8.0, …}   (older: type)
    Kénotron            rope_theta: 500000.0   rope_scaling: {rope_type: llama3, factor: 8.0, …}

A setting that the family's code does not implement is refused by name, never ignored.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any, get_args

from pydantic import ValidationError

from kenotron.checkpoint.folders import Report, quiet
from kenotron.config.architecture import yaml_keys
from kenotron.config.decoder import ACTIVATIONS, ROPE_KEYS, AttentionArchitecture, DecoderArchitecture, RopeArchitecture
from kenotron.config.errors import InputError, NotSupportedYet, nearest
from kenotron.interop.hf_code import config_class
from kenotron.interop.hf_reading import ROPE_UNREAD, model_type_of, refuse_what_differs
from kenotron.interop.whole_config import is_causal_model, one_line, whole_architecture, whole_config
from kenotron.models.family import Family, families, family_named, family_of
from kenotron.models.foreign import HuggingFace, HuggingFaceArchitecture, UserModuleArchitecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Probabilities in published configs; they matter only in training.
DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout")
# Keys of a section that this file sets, or that only Kénotron has.
SETTLED = {"family", "eos_token_id", "hidden_act", "rope_theta", "rope_scaling", "rope_interleaved"}


def architecture_from_hf(
    config: Mapping[str, Any],
    where: str,
    report: Report = quiet,
    overrides: Mapping[str, Any] | None = None,
    family: str | None = None,
) -> DecoderArchitecture:
    """Return the architecture that a `config.json` describes; `overrides` (Kénotron's keys) replace its values.

    The family is found by `model_type` among the built-in families and the family that `overrides` or `family` names.
    `where` is the path of the file, for errors; `report` is called with a line for every choice that was made.
    """
    try:
        return _architecture(config, where, report, overrides, family)
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # values of other types
        raise InputError(f"{where}: not a config that transformers would write: {error}") from error


def _architecture(
    config: Mapping[str, Any], where: str, report: Report, overrides: Mapping[str, Any] | None, family: str | None
) -> DecoderArchitecture:
    overrides = dict(overrides or {})
    config = {**config, "model_type": model_type_of(config)}
    name = overrides.get("family", family)
    kind = _family_of(config, where, name)
    if kind is HuggingFace:
        return whole_architecture(config, where, overrides, report)
    for key in overrides.keys() - yaml_keys(kind.section):
        raise InputError(f"unknown key 'model.model_config.{key}'{nearest(key, yaml_keys(kind.section))}")
    _refuse_foreign(config, where, kind)
    shared = _shared_keys(kind)
    nulls = [
        hf_key for key, hf_key in shared if config.get(hf_key, 0) is None and isinstance(_default(kind, key), bool)
    ]
    config = {**config, **dict.fromkeys(nulls, False)}  # transformers' conditions take null as false
    complete = _hf_defaults(kind) | config
    found = {key: complete[hf_key] for key, hf_key in shared if hf_key in complete}
    nullable = {name for name, field in kind.section.model_fields.items() if NoneType in get_args(field.annotation)}
    found = {key: value for key, value in found.items() if value is not None or key in nullable}
    found |= {"family": name if name and family_named(name) is kind else _default(kind, "family")}
    found |= {"hidden_act": _activation(config.get("hidden_act", _default(kind, "hidden_act")), where)}
    if issubclass(kind.section, RopeArchitecture):
        found |= _rope(config, where, kind)
    found |= _head_dim(complete, where, kind) | _end_of_text(config, where, report)
    for key in ("bos_token_id", "eos_token_id"):
        if key in config and found.get(key) is None:
            report(f"{where}: {key} is null; {_default(kind, key)} is used where there is no tokenizer")
    if dropouts := ", ".join(f"{key} {config[key]}" for key in DROPOUTS if config.get(key)):
        report(
            f"{where}: {dropouts} is ignored: families of ours have no dropout; "
            "model_config: {hf: …, family: kenotron.models.foreign.HuggingFace, training_dropout: true} has it"
        )
    try:
        written = kind.section.model_validate(kind.from_hf(found, config))
        architecture = kind.section.model_validate(kind.from_hf(found, config) | overrides) if overrides else written
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{where}: {key}: {first['msg']}, found {first['input']!r}") from None
    for key, problem in architecture.shape_problems():
        raise InputError(f"{where}: {key}: {problem}")
    if kind.hf_class and not kind.hf_code:
        refuse_what_differs(config, hf_config(written, "float32", written.eos_token_id), where)
    return architecture


def _family_of(config: Mapping[str, Any], where: str, name: str | None) -> type[Family[Any]]:
    known = {family.hf_model_type: family for family in families() if family.hf_model_type}
    kind = config.get("model_type")
    asked = None if name is None else family_named(name)
    if asked is HuggingFace or (asked is None and kind not in known and is_causal_model(kind)):
        return HuggingFace
    if asked is not None:
        known[asked.hf_model_type] = asked
    family = known.get(str(kind))
    names = config.get("architectures") or [family.hf_class if family else ""]
    if family is None or family.hf_class not in names:
        found = kind if family is None else ", ".join(names)
        served = ", ".join(f"{each.hf_model_type} ({each.hf_class})" for each in known.values())
        raise NotSupportedYet(
            f"{where}: model family {found!r}; expected one of {served}, or a causal language model of transformers"
        )
    return family


def _shared_keys(family: type[Family[Any]]) -> list[tuple[str, str]]:
    """Return the pairs (key of the section, key of config.json) whose values are the same on both sides."""
    names = [name for name, field in family.section.model_fields.items() if name not in SETTLED and not field.alias]
    return [(name, family.hf_keys.get(name, name)) for name in names]


def _default(family: type[Family[Any]], name: str) -> Any:
    return family.section.model_fields[name].default


def _hf_defaults(family: type[Family[Any]]) -> dict[str, Any]:
    """Return transformers' defaults for keys that a config.json lacks; empty for a family with its own code files."""
    if family.hf_code:
        return {}
    return {name: each.default for name, each in inspect.signature(config_class(family)).parameters.items()}


def _refuse_foreign(config: Mapping[str, Any], where: str, family: type[Family[Any]]) -> None:
    """Raise NotSupportedYet for a value with which the model would load but compute something else."""
    for key, value in family.hf_fixed.items():
        if config.get(key, value) != value:
            raise NotSupportedYet(f"{where}: {key}: {json.dumps(config[key])}")
    if config.get("quantization_config"):
        raise NotSupportedYet(f"{where}: quantized weights (quantization_config)")
    attends = issubclass(family.section, AttentionArchitecture)
    for key in ("hidden_size", *(["num_attention_heads"] if attends else [])):
        if not isinstance(config.get(key), int):
            raise InputError(f"{where}: {key}: expected an integer, found {config.get(key)!r}")


def _head_dim(config: Mapping[str, Any], where: str, family: type[Family[Any]]) -> dict[str, Any]:
    """Return `head_dim` if it differs from hidden_size / num_attention_heads."""
    if not issubclass(family.section, AttentionArchitecture):
        return {}
    width, head_dim = config["hidden_size"] // config["num_attention_heads"], config.get("head_dim")
    if head_dim in (None, width):
        return {}
    if not any(field.alias == "head_dim" for field in family.section.model_fields.values()):
        raise NotSupportedYet(f"{where}: head_dim {head_dim}, other than hidden_size / num_attention_heads = {width}")
    return {"head_dim": head_dim}


def _end_of_text(config: Mapping[str, Any], where: str, report: Report) -> dict[str, int]:
    eos = config.get("eos_token_id")
    if isinstance(eos, list):
        if len(eos) > 1:
            report(f"{where}: eos_token_id is {eos}; training uses only the first, {eos[0]}")
        eos = eos[0] if eos else None
    return {} if eos is None else {"eos_token_id": eos}


def _activation(name: str, where: str) -> str:
    if name not in ACTIVATIONS:
        raise NotSupportedYet(f"{where}: hidden_act {name!r} (supported: {', '.join(ACTIVATIONS)})")
    return name


def _rope(config: Mapping[str, Any], where: str, family: type[Family[Any]]) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling` and, if the family has it, `rotary_pct`, from the keys of either version."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}  # in transformers' precedence
    rope = {k: v for k, v in settings.items() if v is not None}
    has_key = "rotary_pct" in family.section.model_fields  # GPT-NeoX, which has its own names
    theta = rope.pop("rope_theta", config.get("rotary_emb_base" if has_key else "rope_theta"))
    theta = theta or getattr(config_class(family), "default_theta", 10000.0)
    old_name = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_name)
    if kind not in ROPE_KEYS:
        raise NotSupportedYet(f"{where}: rope_type {kind!r} (supported: {', '.join(ROPE_KEYS)})")
    turning = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct")))
    if turning not in (None, 1, 1.0) and not has_key:
        raise NotSupportedYet(f"{where}: partial_rotary_factor other than 1")
    scaling = {"rope_type": kind} | {k: v for k, v in rope.items() if k not in ROPE_UNREAD[kind]}
    found = {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else scaling}
    return found | ({"rotary_pct": turning} if has_key and turning is not None else {})


def hf_config(architecture: DecoderArchitecture, dtype: str, eos_token_id: int | list[int]) -> PretrainedConfig:
    """Return the architecture as a config object of the installed transformers, which decides how it is written.

    Raises InputError if the family has no counterpart in transformers, or none for these values.
    """
    if isinstance(architecture, HuggingFaceArchitecture):
        return whole_config(architecture, dtype, eos_token_id)
    if isinstance(architecture, UserModuleArchitecture):
        raise InputError(f"module {architecture.module!r} has no counterpart in transformers: it cannot be exported")
    family = family_of(architecture)
    if not family.hf_class:
        raise InputError(
            f"model family {architecture.family!r} has no counterpart in transformers: it cannot be exported"
        )
    with one_line("model.model_config"):
        kind = config_class(family)
        plain = kind()
        values = {
            hf_key: getattr(architecture, key) for key, hf_key in _shared_keys(type(family)) if hasattr(plain, hf_key)
        }
        if isinstance(architecture, AttentionArchitecture):
            values |= _heads_for(plain, architecture, family.hf_class)
        if isinstance(architecture, RopeArchitecture):
            values |= _rope_for(plain, architecture)
            if architecture.free_head_dim is not None or hasattr(plain, "head_dim"):
                values["head_dim"] = architecture.head_dim
        values |= {"hidden_act": architecture.hidden_act, "eos_token_id": eos_token_id, "dtype": dtype}
        values |= {**family.hf_fixed, "architectures": [family.hf_class]}
        values |= {"auto_map": dict(family.hf_code)} if family.hf_code else {}
        return kind(**family.to_hf(values))


def _heads_for(plain: PretrainedConfig, architecture: AttentionArchitecture, hf_class: str) -> dict[str, Any]:
    if hasattr(plain, "num_key_value_heads"):
        return {"num_key_value_heads": architecture.kv_heads}
    if architecture.kv_heads != architecture.num_attention_heads:
        raise InputError(f"num_key_value_heads {architecture.kv_heads}: {hf_class} has no grouped queries")
    return {}


def _rope_for(plain: PretrainedConfig, architecture: RopeArchitecture) -> dict[str, Any]:
    scaling = dict(architecture.rope_scaling or {})
    if "type" in scaling:
        scaling = {"rope_type": scaling.pop("type")} | scaling
    rope = getattr(plain, "rope_parameters", None)
    if rope is None:  # before transformers 5
        return {"rope_theta": architecture.rope_theta, "rope_scaling": scaling or None}
    turning = {"partial_rotary_factor": architecture.rotary_factor} if "partial_rotary_factor" in rope else {}
    return {"rope_parameters": {"rope_type": "default"} | turning | scaling | {"rope_theta": architecture.rope_theta}}
