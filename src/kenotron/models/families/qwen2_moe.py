"""Qwen2 with experts (arXiv 2407.10671): many small experts, and a shared one that a gate weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from kenotron.config.section import key, our_key
from kenotron.models.families.mixtral import SparseArchitecture, SparseStyle

if TYPE_CHECKING:
    from torch import nn


class QwenSparseArchitecture(SparseArchitecture):
    """The keys of a Qwen for the layers with experts, and for their sizes."""

    num_experts_per_tok: int = key("Experts per token.", 4, ge=1)
    num_experts: int = key("Experts per layer.", 60, ge=1)
    moe_intermediate_size: int = key("Width inside an expert.", 1408, ge=1)
    norm_topk_prob: bool = key("Divide the weights of a token's experts by their sum.", False)
    decoder_sparse_step: int = key("N: every N-th layer has experts.", 1, ge=1)
    mlp_only_layers: list[int] = key("Layers that have a plain MLP all the same.", [])

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return every `decoder_sparse_step`-th layer, without `mlp_only_layers`."""
        step = self.decoder_sparse_step
        layers = range(step - 1, self.num_hidden_layers, step)
        return tuple(layer for layer in layers if layer not in self.mlp_only_layers)


class Qwen2MoeArchitecture(QwenSparseArchitecture):
    """The Qwen2-MoE family, under Hugging Face's names."""

    family: Literal["qwen2_moe"] = our_key("The family's name.", "qwen2_moe")
    is_qwen2_moe_config: bool = our_key("Marks the family; its value changes nothing.", True)
    qkv_bias: bool = key("Biases on the query, key and value projections.", True)
    shared_expert_intermediate_size: int = key("Width inside the shared expert.", 5632, ge=1)


class Qwen2Moe(SparseStyle[Qwen2MoeArchitecture]):
    """Qwen2-MoE, with biases as in Qwen2."""

    section = Qwen2MoeArchitecture
    hf_model_type = "qwen2_moe"
    hf_class = "Qwen2MoeForCausalLM"
    hf_fixed = {"use_sliding_window": False}  # noqa: RUF012

    def attention(self, layer: int) -> nn.Module:
        """Return the attention module of layer `layer`."""
        from kenotron.models.blocks.attention import Attention

        return Attention.of(self.config, layer, qkv_bias=self.config.qkv_bias)

    def shared_expert(self) -> tuple[nn.Module, nn.Module]:
        """Return a gated MLP and its gate."""
        return self.gated_expert(self.config.shared_expert_intermediate_size)
