"""Settings that weights were trained with and that their shapes do not show.

    weights of Llama 3 (rope_theta: 500000) in a config without rope_theta, whose default is 10000:
    "model.model_config.rope_theta is 10000.0, but the weights in llama-3 were trained with 500000.0"

Nothing fails then: the loss is only higher than it should be. To change a setting on purpose is common, too (a larger
rope_theta for longer sequences), so this is a warning.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.section import EXPORT, NO_EFFECT

# Keys that may differ: names, losses, lengths, what is converted (`interop.sources.fitted`) or only draws weights.
_FREE = re.compile(
    r"family|is_\w+_config|\w+_token_id|_attn_implementation|z_loss_\w+|router_\w+|moe_\w*capacity_factor|"
    r"num_key_value_heads|head_dim|tie_word_embeddings|rope_interleaved?|time_step_\w+|max_position_embeddings|"
    r"hf_config|module|given|blocks"  # a model of transformers, or a user's: what it was given, and how it is run
)


def changed_settings(have: DecoderArchitecture, wanted: DecoderArchitecture, path: Path) -> Iterator[str]:
    """A line for each setting that the weights of `have` in `path` were trained with at another value than `wanted`'s.

    Keys that only one of the two families has are not compared, and neither are shapes.
    """
    fields = type(have).model_fields
    for name, field in type(wanted).model_fields.items():
        key, extra = field.alias or name, field.json_schema_extra
        if name not in fields or name in wanted.shape_keys or _FREE.fullmatch(key):
            continue
        if isinstance(extra, dict) and extra.get("mark") in (EXPORT, NO_EFFECT):
            continue
        if (old := getattr(have, name)) != (new := getattr(wanted, name)):
            yield f"model.model_config.{key} is {new}, but the weights in {path} were trained with {old}"
