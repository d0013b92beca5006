"""Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose tokens attend to the last `sliding_window` tokens only.

Later models of the family have no window: `sliding_window: null`.
"""

from typing import Literal

from kenotron.config.section import OURS, key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture


class MistralArchitecture(LlamaStyleArchitecture):
    """The Mistral family, under Hugging Face's names."""

    family: Literal["mistral"] = key("The family's name.", "mistral", mark=OURS)
    is_mistral_config: bool = key("Marks the family; its value changes nothing.", True, mark=OURS)
    sliding_window: int | None = key(
        "Tokens that a token attends to, itself included; null: all before it.", 4096, ge=1, mark=OURS
    )

    @property
    def attention_window(self) -> int | None:
        """The sliding window."""
        return self.sliding_window


class Mistral(LlamaStyle[MistralArchitecture]):
    """No biases; the window is attention's (`kernels.attention`)."""

    section = MistralArchitecture
    hf_model_type = "mistral"
    hf_class = "MistralForCausalLM"
