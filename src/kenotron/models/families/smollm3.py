"""SmolLM3 (huggingface.co/blog/smollm3): a Llama in which every fourth layer has no RoPE (arXiv 2501.18795).

    layer           0      1      2      3      4      5      6      7
                    RoPE   RoPE   RoPE   none   RoPE   RoPE   RoPE   none

A layer without rotary positions distinguishes tokens only by their content and the causal mask.
"""

from collections.abc import Iterator
from typing import Literal

from kenotron.config.decoder import Problem
from kenotron.config.section import key, our_key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture


class SmolLM3Architecture(LlamaStyleArchitecture):
    """The SmolLM3 family, under Hugging Face's names."""

    family: Literal["smollm3"] = our_key("The family's name.", "smollm3")
    is_smollm3_config: bool = our_key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the attention projections.", False)
    no_rope_layer_interval: int = our_key("N: every N-th layer has no rotary positions.", 4, ge=1)
    no_rope_layers: list[Literal[0, 1]] | None = our_key(
        "Layer by layer, 1: rotary positions, 0: none (so Hugging Face has it, despite the name); null: by "
        "no_rope_layer_interval.",
        None,
    )

    def uses_rope(self, layer: int) -> bool:
        """Return whether layer `layer` has RoPE, by the list, or without a list by the interval."""
        if self.no_rope_layers is not None:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem unless the list has a number for every layer."""
        yield from super().shape_problems()
        layers, listed = self.num_hidden_layers, self.no_rope_layers
        if listed is not None and len(listed) < layers:
            yield "no_rope_layers", f"expected a number for each of num_hidden_layers {layers}, found {len(listed)}"


class SmolLM3(LlamaStyle[SmolLM3Architecture]):
    """SmolLM3, which differs from Llama only in the section's `uses_rope`."""

    section = SmolLM3Architecture
    hf_model_type = "smollm3"
    hf_class = "SmolLM3ForCausalLM"
    hf_fixed = {"use_sliding_window": False, "mlp_bias": False}  # noqa: RUF012
