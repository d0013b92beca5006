"""Qwen3, dense (arXiv 2505.09388): a Llama whose queries and keys are normalized head by head, before RoPE.

Published models have a `head_dim` independent of the hidden size: 64 heads of 128 channels with a hidden size of 5120.
"""

from dataclasses import replace
from typing import Literal

from kenotron.config.section import key, our_key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture


class Qwen3Architecture(LlamaStyleArchitecture):
    """The dense Qwen3 family, under Hugging Face's names."""

    family: Literal["qwen3"] = our_key("The family's name.", "qwen3")
    is_qwen3_config: bool = our_key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the attention projections.", False)


class Qwen3(LlamaStyle[Qwen3Architecture]):
    """Qwen3, with two more norms per layer; with tp, a rank normalizes its own heads."""

    section = Qwen3Architecture
    qk_norm = "heads"
    plan = replace(LlamaStyle.plan, per_head=("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"))
    hf_model_type = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    hf_fixed = {"use_sliding_window": False}  # noqa: RUF012
