"""Qwen2 and Qwen2.5, dense (arXiv 2407.10671, 2412.15115): a Llama whose query, key and value projections have biases.

nanotron's Qwen2 has them only with `attention_bias`, and more keys: layers without RoPE, and experts and windows, which
are known here and refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kenotron.config.decoder import Problem
from kenotron.config.errors import InputError
from kenotron.config.section import NO_EFFECT, OURS, key
from kenotron.models.families.llama import LlamaStyle, LlamaStyleArchitecture

if TYPE_CHECKING:
    from torch import nn

_UNSERVED = "Known from nanotron; only its default is supported."
_KERNEL = "Chooses a kernel of nanotron's; the fastest is taken here anyway."


class Qwen2Architecture(LlamaStyleArchitecture):
    """The dense Qwen2 family, under Hugging Face's and nanotron's names."""

    not_served: ClassVar[tuple[str, ...]] = (
        "rope_seq_len_interpolation_factor",
        "flex_attention_mask",
        "sliding_window_size",
        "use_doc_masking",
        "ring_attn_heads_k_stride",
        "moe_config",
    )

    family: Literal["qwen2"] = key("The family's name.", "qwen2", mark=OURS)
    is_qwen2_config: bool = key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the query, key and value projections (Hugging Face's Qwen2 has them).", False)
    pretraining_tp: int = key("Accepted for old files.", 1, mark=NO_EFFECT)
    rope_seq_len_interpolation_factor: float | None = key(_UNSERVED, None)
    flex_attention_mask: str | None = key(_UNSERVED, None)
    sliding_window_size: int | None = key(_UNSERVED, None)
    no_rope_layer: int | None = key("N: every N-th layer has no rotary positions; null: all have.", None, ge=1)
    use_doc_masking: bool = key(_UNSERVED + " (Here: model.document_masking.)", False, alias="_use_doc_masking")
    ring_attn_heads_k_stride: int | None = key(_UNSERVED, None)
    moe_config: dict[str, Any] | None = key(_UNSERVED, None)
    fused_rotary_emb: bool = key(_KERNEL, True, alias="_fused_rotary_emb", mark=NO_EFFECT)
    fused_rms_norm: bool = key(_KERNEL, True, alias="_fused_rms_norm", mark=NO_EFFECT)
    use_qkv_packed: bool = key(_KERNEL, True, alias="_use_qkv_packed", mark=NO_EFFECT)
    log_attn_probs: bool = key("Statistics that nanotron sends to W&B.", True, mark=NO_EFFECT)

    def uses_rope(self, layer: int) -> bool:
        """By `no_rope_layer`."""
        return self.no_rope_layer is None or (layer + 1) % self.no_rope_layer != 0

    def shape_problems(self) -> Iterator[Problem]:
        """As in nanotron, the layers are whole rounds of `no_rope_layer`."""
        yield from super().shape_problems()
        if self.no_rope_layer is not None and self.num_hidden_layers % self.no_rope_layer:
            expected = f"expected a divisor of num_hidden_layers {self.num_hidden_layers}, found {self.no_rope_layer}"
            yield "no_rope_layer", expected


class Qwen2(LlamaStyle[Qwen2Architecture]):
    """Biases on q, k and v, none on the output projection."""

    section = Qwen2Architecture
    hf_model_type = "qwen2"
    hf_class = "Qwen2ForCausalLM"
    hf_fixed = {"use_sliding_window": False}  # noqa: RUF012

    def block(self, layer: int) -> nn.Module:
        """Layer number `layer`."""
        return self.pre_norm_block(layer, qkv_bias=self.config.attention_bias)

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Hugging Face's Qwen2 always has the biases, so it has no key for them."""
        return values | {"attention_bias": True}

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """Without biases, or with layers without RoPE, there is no Qwen2 there."""
        if self.config.no_rope_layer is not None:
            raise InputError(
                f"no_rope_layer: {self.config.no_rope_layer}: Hugging Face's Qwen2 has rotary positions in every "
                "layer; without attention_bias the same model is a SmolLM3: replace is_qwen2_config by "
                "is_smollm3_config and no_rope_layer by no_rope_layer_interval in the checkpoint's config.yaml"
            )
        if not self.config.attention_bias:
            raise InputError(
                "attention_bias: false: Hugging Face's Qwen2 has biases on q, k and v; the same model is a Llama: "
                "replace is_qwen2_config by is_llama_config in the checkpoint's config.yaml"
            )
        return values
