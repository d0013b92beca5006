"""Qwen3, dense (arXiv 2505.09388): a Llama whose queries and keys are normalized head by head, before RoPE.

The published ones make use of a free `head_dim`: 64 heads of 128 channels read a residual stream of 5120.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kenotron.config.section import key, our_key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture

if TYPE_CHECKING:
    from torch import nn


class Qwen3Architecture(LlamaStyleArchitecture):
    """The dense Qwen3 family, under Hugging Face's names."""

    family: Literal["qwen3"] = our_key("The family's name.", "qwen3")
    is_qwen3_config: bool = our_key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the attention projections.", False)


def attention_with_head_norms(config: LlamaStyleArchitecture, layer: int) -> nn.Module:
    """Attention whose queries and keys are normalized head by head, with the biases of `attention_bias`."""
    from kenotron.models.blocks.attention import Attention
    from kenotron.models.blocks.norm import HeadRMSNorm

    bias, width, eps = config.attention_bias, config.head_dim, config.rms_norm_eps  # type: ignore[attr-defined]
    q_norm, k_norm = HeadRMSNorm(width, eps), HeadRMSNorm(width, eps)
    return Attention.of(config, layer, qkv_bias=bias, output_bias=bias, q_norm=q_norm, k_norm=k_norm)


class Qwen3(LlamaStyle[Qwen3Architecture]):
    """Two more norms a layer; a rank of tp normalizes its own heads."""

    section = Qwen3Architecture
    plan = replace(LlamaStyle.plan, per_head=("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"))
    hf_model_type = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    hf_fixed = {"use_sliding_window": False}  # noqa: RUF012

    def attention(self, layer: int) -> nn.Module:
        """With a norm for each head of queries and of keys."""
        return attention_with_head_norms(self.config, layer)
