"""Check that transformers' model would compute the same from a `config.json` as Kénotron's section of it.

A section has only the keys of its family. A file may say more, such as a key of another family, or a null where the
default is true. Whether that matters is decided by transformers' code: every attribute of the config that its modeling
module reads must have the same value in the file and in the section converted back to a config. Keys that the module
does not read are ignored.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import NotSupportedYet
from kenotron.interop.whole_config import one_line
from kenotron.models.foreign import with_floats

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Attributes read outside of that module, by code that all models share → their value in a config that lacks them.
OF_ALL: dict[str, Any] = {"is_causal": True, "layer_types": None, "tie_word_embeddings": None}
# Attributes that are read but do not change the logits of a trained model: outputs, speed, token ids, auxiliary losses.
NAMES_NOT_OF_MATHS = """
    _attn_implementation _experts_implementation chunk_size eos_token_id is_encoder_decoder max_position_embeddings
    num_labels pad_token_id problem_type residual_in_fp32 return_dict router_aux_loss_coef router_jitter_noise use_cache
    use_mambapy vocab_size
"""
NOT_MATHS = frozenset(NAMES_NOT_OF_MATHS.split())
NOT_MATHS_PARTS = ("drop", "output_", "return_", "gradient_checkpointing")

# RoPE type → keys that transformers writes for it although its rule does not read them.
ROPE_UNREAD: dict[str, set[str]] = {
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"original_max_position_embeddings"},
    "dynamic": {"original_max_position_embeddings"},
    "llama3": set(),
    "yarn": {"finetuned"},
}


def model_type_of(config: Mapping[str, Any]) -> Any:
    """Return the `model_type` of the class that transformers' Auto classes choose."""
    kind = config.get("model_type")
    return "ministral" if kind == "mistral" and "layer_types" in config else kind


def refuse_what_differs(config: Mapping[str, Any], converted: PretrainedConfig, where: str) -> None:
    """Raise NotSupportedYet if transformers' modeling module reads a value from `config` that `converted` lacks.

    `converted` is the section converted back to a config; `where` is the path of the file that `config` comes from.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    with one_line(where):
        original = type(converted).from_dict(with_floats(config))
    for name in sorted(_names_read(MODEL_FOR_CAUSAL_LM_MAPPING[type(converted)].__module__)):
        found, computed = _value(original, name), _value(converted, name)
        if found != computed:
            said = "" if computed is None else f"; expected {computed!r}"
            raise NotSupportedYet(f"{where}: {name}: {config.get(name, found)!r}{said}")


def _value(config: PretrainedConfig, name: str) -> Any:
    """Return the attribute in a comparable form: None if it is missing, or false in a condition (except 0)."""
    value = getattr(config, name, OF_ALL.get(name))
    if name == "rope_parameters" and isinstance(value, dict):
        unread = {"type"} | ROPE_UNREAD.get(value.get("rope_type", "default"), set())
        value = {key: each for key, each in value.items() if key not in unread and each is not None}
        value = {"partial_rotary_factor": 1.0} | value
    if name == "head_dim" and value is None and hasattr(config, "num_attention_heads"):
        return config.hidden_size // config.num_attention_heads
    if name == "layer_types" and set(value or ()) <= {"full_attention"}:
        return None
    value = list(value) if isinstance(value, tuple) else value
    return None if value is False or value in ([], {}) or callable(value) else value


@cache
def _names_read(modeling_module: str) -> set[str]:
    names = {*_attributes_of_configs(import_module(modeling_module)), *OF_ALL}
    return {name for name in names - NOT_MATHS if not any(part in name for part in NOT_MATHS_PARTS)}


def _attributes_of_configs(module: ModuleType) -> Iterator[str]:
    """Yield the names in `config.name` and `getattr(config, "name", …)`, except in `_init_weights` methods."""
    pending: list[ast.AST] = [ast.parse(inspect.getsource(module))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "_init_weights":
            continue
        pending += ast.iter_child_nodes(node)
        match node:
            case ast.Attribute(value=owner, attr=name) if _is_config(owner):
                yield name
            case ast.Call(func=ast.Name("getattr"), args=[owner, ast.Constant(str(name)), *_]) if _is_config(owner):
                yield name


def _is_config(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")).endswith("config")
