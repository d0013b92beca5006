"""Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose tokens attend to the last `sliding_window` tokens only.

Later models of the family have no window: `sliding_window: null`.
"""

from typing import Literal

from kenotron.config.section import our_key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture


class MistralArchitecture(LlamaStyleArchitecture):
    """The Mistral family, under Hugging Face's names."""

    family: Literal["mistral"] = our_key("The family's name.", "mistral")
    is_mistral_config: bool = our_key("Marks the family; its value changes nothing.", True)
    sliding_window: int | None = our_key(
        "Tokens that a token attends to, itself included; null: all before it.", 4096, ge=1
    )


class Mistral(LlamaStyle[MistralArchitecture]):
    """Mistral, without biases; attention applies the window (`kernels.attention`)."""

    section = MistralArchitecture
    hf_model_type = "mistral"
    hf_class = "MistralForCausalLM"
