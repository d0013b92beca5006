"""Convert between config.json and a section of `models.foreign`, for transformers models without a Kénotron family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kenotron.checkpoint.folders import Report
from kenotron.config.errors import InputError, NotSupportedYet, nearest
from kenotron.interop.older_readers import ROPE_SPELLINGS
from kenotron.models.foreign import ForeignArchitecture, HuggingFaceArchitecture, with_floats

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def is_causal_model(model_type: Any) -> bool:
    """Return whether transformers has an `AutoModelForCausalLM` for this `model_type`."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    return model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING


def whole_architecture(
    config: Mapping[str, Any], where: str, overrides: Mapping[str, Any], report: Report
) -> HuggingFaceArchitecture:
    """Return the section of the model that a `config.json` describes.

    `overrides` are keys of the config.json, and Kénotron's `family`, `blocks` and `training_dropout`.
    Raises InputError if the model is not causal, its config does not have a key, or does not accept a value.
    """
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if not is_causal_model(kind):
        raise NotSupportedYet(f"{where}: transformers has no causal language model for model_type {kind!r}")
    if config.get("quantization_config"):
        raise NotSupportedYet(f"{where}: quantized weights (quantization_config)")
    with one_line(where):
        plain = CONFIG_MAPPING[kind].from_dict(with_floats(config))
    values = dict(config)
    if "rope_parameters" in overrides:  # older spellings of the same would win
        values = {name: value for name, value in values.items() if name not in ROPE_SPELLINGS}
    own_keys = ForeignArchitecture.model_fields.keys() & {"family", "blocks", "training_dropout"}
    dropout = bool(overrides.get("training_dropout"))
    valid = plain.to_dict().keys() | plain.attribute_map.keys() | own_keys
    for name in overrides.keys() - own_keys:
        at = f"model.model_config.{name}"
        if name not in valid:
            raise InputError(f"{at}: the config of {kind} has no such key{nearest(name, valid)}")
        if "drop" in name and overrides[name] and not dropout:
            raise InputError(f"{at}: {overrides[name]} has no effect without training_dropout: true beside it")
        its_name = plain.attribute_map.get(name, name)
        values = {key: value for key, value in values.items() if plain.attribute_map.get(key, key) != its_name}
        values[its_name] = overrides[name]
    with one_line(where):
        found = CONFIG_MAPPING[kind].from_dict(with_floats(values)).get_text_config()
    for name in [name for name in config if "drop" in name and config[name] and not dropout]:
        report(f"{where}: {name} {config[name]} is off: model.model_config.training_dropout: true trains with it")
    if getattr(found, "output_router_logits", False):
        raise NotSupportedYet(f"{where}: output_router_logits: the loss of a router (expected false)")
    special = {name: getattr(found, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    special = {name: each[0] if isinstance(each, list) and each else each for name, each in special.items()}
    shapes: dict[str, Any] = {
        "vocab_size": found.vocab_size,
        "hidden_size": found.hidden_size,
        "num_hidden_layers": found.num_hidden_layers,
        "tie_word_embeddings": bool(getattr(found, "tie_word_embeddings", False)),
        "max_position_embeddings": getattr(found, "max_position_embeddings", None),
    } | special
    known = {name: value for name, value in shapes.items() if isinstance(value, int) and value >= 0}
    blocks = {"blocks": overrides["blocks"]} if overrides.get("blocks") else {}
    own = blocks | {"training_dropout": overrides.get("training_dropout", False)}
    return HuggingFaceArchitecture.model_validate(known | own | {"hf_config": values})


@contextmanager
def one_line(where: str) -> Iterator[None]:
    """Turn what transformers raises into an InputError of one line, and hide what it prints."""
    try:
        with quietly():
            yield
    except InputError:
        raise
    except Exception as error:  # its checks raise many types, some of their own
        raise InputError(f"{where}: {' '.join(str(error).split())}") from error


@contextmanager
def quietly() -> Iterator[None]:
    """Hide transformers' warnings and progress bars."""
    from transformers.utils import logging

    verbosity, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def whole_config(architecture: HuggingFaceArchitecture, dtype: str, eos_token_id: int | list[int]) -> PretrainedConfig:
    """Return the config of an export."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    with one_line("model.model_config"):
        config = architecture.transformers_config()
        config.eos_token_id, config.dtype = eos_token_id, dtype
        vars(config).pop("auto_map", None)  # code files that the export does not have
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]  # type: ignore[attr-defined]
    return config
