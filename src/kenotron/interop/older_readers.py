"""Add the keys to an export that readers of transformers 4's files look for, beside those of transformers 5.

    transformers 5        rope_parameters: {rope_theta, rope_type, …}   dtype         tokenizer_class: TokenizersBackend
    added in config.json  rope_theta, rope_scaling, …                   torch_dtype
    in its place                                                                      PreTrainedTokenizerFast

Without them, a reader that has only the older names silently uses its defaults, theta 10000 and no scaling.
transformers 5 reads both spellings as the same model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# The older names of theta in models where it differs between layers with full and with sliding-window attention.
THETAS_BY_LAYER = {
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    "gemma3n_text": ("rope_theta", "rope_local_base_freq"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
    "olmo3": ("rope_theta", "rope_theta"),
}
# Older keys for the settings in `rope_parameters`.
ROPE_SPELLINGS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_emb_base", "rotary_pct"}
ROPE_SPELLINGS |= {"rope_local_base_freq", "global_rope_theta", "local_rope_theta"}


def with_older_keys(written: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Return the content of a `config.json`, `written` from `config`, with the older keys added."""
    found = dict(written) | _rope(written)
    if "dtype" in written:
        found["torch_dtype"] = written["dtype"]
    if (its_name := config.attribute_map.get("num_experts", "")) in written:
        found["num_experts"] = written[its_name]
    if hasattr(config, "hybrid_override_pattern"):  # of Nemotron-H
        found |= {name: getattr(config, name) for name in ("hybrid_override_pattern", "num_hidden_layers")}
    for key, value in written.items():
        # JSON has no infinity, so transformers 5 writes an object; a default needs no key in either version.
        if "__float__" in str(value) and list(getattr(type(config), key, ())) == list(getattr(config, key)):
            del found[key]
    return found


def _rope(written: Mapping[str, Any]) -> dict[str, Any]:
    rope = written.get("rope_parameters") or {}
    kind = str(written.get("model_type"))
    if "rope_theta" in rope:
        theta, turning = rope["rope_theta"], rope.get("partial_rotary_factor")
        found = {"rope_theta": theta, "rope_scaling": _scaling(rope, written)}
        found |= {} if turning is None else {"partial_rotary_factor": turning}
        return found | ({"rotary_emb_base": theta, "rotary_pct": turning} if kind.startswith("gpt_neox") else {})
    if kind in THETAS_BY_LAYER and {"full_attention", "sliding_attention"} <= rope.keys():
        whole, window = rope["full_attention"], rope["sliding_attention"]
        names = THETAS_BY_LAYER[kind]
        found = {names[0]: whole["rope_theta"], names[1]: window["rope_theta"]}
        return found | {"rope_scaling": _scaling(whole, written)}
    return {}


def _scaling(rope: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling`, with its type under both of its older names."""
    kind = rope.get("rope_type", "default")
    rest = {k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")}
    if kind == "default" and not rest:
        return None
    if kind != "longrope":
        return {"rope_type": kind, "type": kind} | rest
    original = "original_max_position_embeddings"
    if written.get(original) == rest.get(original):  # Phi-3 counts the keys: the length is a key of the config
        rest.pop(original, None)
    return {"type": kind} | rest


def with_older_class(tokenizer_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json` in a form that transformers 4 reads as well.

    `extra_special_tokens` is a list in transformers 5; transformers 4 fails on it and calls the list
    `additional_special_tokens`.
    """
    found = dict(tokenizer_config)
    if str(found.get("tokenizer_class") or "Backend").endswith("Backend"):
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(found.get("extra_special_tokens"), list):
        found.setdefault("additional_special_tokens", []).extend(found.pop("extra_special_tokens"))
    return found
