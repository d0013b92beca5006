"""OLMo 2 (arXiv 2501.00656): a Llama with norms after attention and MLP, and norms of queries and keys.

The norms of queries and keys are over all heads together; with tp, the ranks add up their sums of squares.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kenotron.config.section import key, our_key
from kenotron.models.families.llama import ATTENTION, LlamaStyle, LlamaStyleArchitecture

if TYPE_CHECKING:
    from torch import nn

Q_NORM, K_NORM = f"{ATTENTION}.q_norm", f"{ATTENTION}.k_norm"


class Olmo2Architecture(LlamaStyleArchitecture):
    """The OLMo 2 family, under Hugging Face's names."""

    family: Literal["olmo2"] = our_key("The family's name.", "olmo2")
    is_olmo2_config: bool = our_key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the attention projections.", False)


class Olmo2(LlamaStyle[Olmo2Architecture]):
    """OLMo 2, with a norm after each branch and none before."""

    section = Olmo2Architecture
    qk_norm = "all"
    plan = replace(
        LlamaStyle.plan,
        column=(*LlamaStyle.plan.column, Q_NORM, K_NORM),
        kv=(*LlamaStyle.plan.kv, K_NORM),
        sequence=("model.layers.*.post_attention_layernorm", "model.layers.*.post_feedforward_layernorm", "model.norm"),
    )
    hf_model_type = "olmo2"
    hf_class = "Olmo2ForCausalLM"

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`."""
        from kenotron.models.blocks.post_norm import PostNormBlock

        mlp = self.gated_mlp(self.config.intermediate_size)
        return PostNormBlock(self.attention(layer), self.final_norm(), mlp, self.final_norm())
