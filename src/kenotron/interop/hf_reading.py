"""A `config.json` as transformers' own model reads it, beside what our section makes of it.

A section knows the keys of its family. Whether a file says more than that, a key of another family or a null where the
default is true, is decided by the reader's code: every attribute of the config that the modeling module of transformers
takes must have the value that our section, turned back into a config, has. Keys that no module reads change nothing.
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

# Read outside of that module, by code that all models share: the value of a config that does not have it.
OF_ALL: dict[str, Any] = {"is_causal": True, "layer_types": None, "tie_word_embeddings": None}
# Read, and without influence on what a trained model computes: outputs, speed, tokens, and terms of its own loss.
NAMES_NOT_OF_MATHS = """
    _attn_implementation _experts_implementation chunk_size eos_token_id is_encoder_decoder max_position_embeddings
    num_labels pad_token_id problem_type residual_in_fp32 return_dict router_aux_loss_coef router_jitter_noise use_cache
    use_mambapy vocab_size
"""
NOT_MATHS = frozenset(NAMES_NOT_OF_MATHS.split())
NOT_MATHS_PARTS = ("drop", "output_", "return_", "gradient_checkpointing")

# Keys that transformers writes beside rules that do not read them.
ROPE_UNREAD: dict[str, set[str]] = {
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"original_max_position_embeddings"},
    "dynamic": {"original_max_position_embeddings"},
    "llama3": set(),
    "yarn": {"finetuned"},
}


def model_type_of(config: Mapping[str, Any]) -> Any:
    """The `model_type` of the class that transformers' Auto classes pick."""
    kind = config.get("model_type")
    return "ministral" if kind == "mistral" and "layer_types" in config else kind


def refuse_what_differs(config: Mapping[str, Any], ours: PretrainedConfig, where: str) -> None:
    """NotSupportedYet, by name: the modeling module would read another value from the file `where` than from `ours`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    with one_line(where):
        theirs = type(ours).from_dict(with_floats(config))
    for name in sorted(_names_read(MODEL_FOR_CAUSAL_LM_MAPPING[type(ours)].__module__)):
        found, computed = _value(theirs, name), _value(ours, name)
        if found != computed:
            said = "" if computed is None else f"; expected {computed!r}"
            raise NotSupportedYet(f"{where}: {name}: {config.get(name, found)!r}{said}")


def _value(config: PretrainedConfig, name: str) -> Any:
    """None for whatever a condition takes as false, 0 excepted, and for an attribute that there is not."""
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
    """Names in `config.name` and `getattr(config, "name", …)`, outside of the functions that set first weights."""
    waiting: list[ast.AST] = [ast.parse(inspect.getsource(module))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "_init_weights":
            continue
        waiting += ast.iter_child_nodes(node)
        match node:
            case ast.Attribute(value=owner, attr=name) if _is_config(owner):
                yield name
            case ast.Call(func=ast.Name("getattr"), args=[owner, ast.Constant(str(name)), *_]) if _is_config(owner):
                yield name


def _is_config(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")).endswith("config")
