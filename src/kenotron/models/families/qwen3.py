"""Qwen3, dense (arXiv 2505.09388): a Llama whose queries and keys are normalized head by head, before RoPE.

A head's width is free: 64 heads of 128 channels read a residual stream of 5120.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from kenotron.config.decoder import Problem
from kenotron.config.section import OURS, key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture

if TYPE_CHECKING:
    from torch import nn


class Qwen3Architecture(LlamaStyleArchitecture):
    """The dense Qwen3 family, under Hugging Face's names."""

    family: Literal["qwen3"] = key("The family's name.", "qwen3", mark=OURS)
    is_qwen3_config: bool = key("Marks the family; its value changes nothing.", True, mark=OURS)
    attention_bias: bool = key("Biases on the attention projections.", False)
    free_head_dim: int | None = key(
        "Channels of one head; null: hidden_size / num_attention_heads.", None, ge=2, alias="head_dim", mark=OURS
    )

    @property
    def head_dim(self) -> int:
        """Channels of one head, with the default filled in."""
        return self.free_head_dim or super().head_dim

    def head_dim_problems(self) -> Iterator[Problem]:
        """A `head_dim` that is given need not fit hidden_size, but RoPE rotates pairs of channels."""
        if self.free_head_dim is None:
            yield from super().head_dim_problems()
        elif self.free_head_dim % 2:
            yield "head_dim", f"expected an even number, found {self.free_head_dim}"


class Qwen3(LlamaStyle[Qwen3Architecture]):
    """Two more norms a layer; a rank of tp normalizes its own heads."""

    section = Qwen3Architecture
    plan = replace(LlamaStyle.plan, per_head=("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"))
    hf_model_type = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    hf_fixed = {"use_sliding_window": False}  # noqa: RUF012

    def block(self, layer: int) -> nn.Module:
        """Layer number `layer`."""
        from kenotron.models.blocks.norm import HeadRMSNorm

        bias, width, eps = self.config.attention_bias, self.config.head_dim, self.config.rms_norm_eps
        q_norm, k_norm = HeadRMSNorm(width, eps), HeadRMSNorm(width, eps)
        return self.pre_norm_block(layer, qkv_bias=bias, output_bias=bias, q_norm=q_norm, k_norm=k_norm)

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json without head_dim means 128 there, whatever the widths."""
        return values | {"head_dim": config.get("head_dim", 128)}

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """The width in use, by name."""
        return values | {"head_dim": self.config.head_dim}
