"""Compare settings that weights were trained with, and that their shapes do not show, with a config.

    weights of Llama 3 (rope_theta: 500000) in a config without rope_theta, whose default is 10000:
    "model.model_config.rope_theta is 10000.0, but the weights in llama-3 were trained with 500000.0"

Such a run does not fail, but its loss is higher than it should be. A setting may also be changed on purpose (a larger
rope_theta for longer sequences), so this is a warning.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.section import EXPORT, NO_EFFECT

# Keys that may differ: of names, losses, lengths, initialization, and what `interop.sources.fitted` converts.
_FREE = re.compile(
    r"family|is_\w+_config|\w+_token_id|_attn_implementation|z_loss_\w+|router_\w+|moe_\w*capacity_factor|"
    r"num_key_value_heads|head_dim|tie_word_embeddings|rope_interleaved?|time_step_\w+|max_position_embeddings|"
    r"hf_config|module|given|blocks"  # a model of transformers, or of the user: its arguments, and how it is run
)


def changed_settings(saved: DecoderArchitecture, config: DecoderArchitecture, path: Path) -> Iterator[str]:
    """Yield a line for each setting of `saved`, which the weights in `path` were trained with, that `config` changes.

    Keys that only one of the two families has are not compared, and neither are shapes.
    """
    fields = type(saved).model_fields
    for name, field in type(config).model_fields.items():
        key, extra = field.alias or name, field.json_schema_extra
        if name not in fields or name in config.shape_keys or _FREE.fullmatch(key):
            continue
        if isinstance(extra, dict) and extra.get("mark") in (EXPORT, NO_EFFECT):
            continue
        old, new = getattr(saved, name), getattr(config, name)
        if old != new:
            yield f"model.model_config.{key} is {new}, but the weights in {path} were trained with {old}"
