"""Qwen2 and Qwen2.5, dense (arXiv 2407.10671, 2412.15115): a Llama whose query, key and value projections have biases.

nanotron's Qwen2 has them only with `attention_bias`, and has more keys: layers without RoPE, windows, and experts under
`moe_config`. Its unsupported keys are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kenotron.config.decoder import Problem
from kenotron.config.errors import InputError
from kenotron.config.section import NO_EFFECT, Section, key, our_key
from kenotron.models.families.llama import LlamaStyleArchitecture
from kenotron.models.families.mixtral import SparseStyle

if TYPE_CHECKING:
    from torch import nn

    from kenotron.models.blocks.moe import Routing

_UNSERVED = "Known from nanotron; only its default is supported."
_KERNEL = "Chooses a kernel of nanotron's; the fastest is taken here anyway."


class NanotronExperts(Section):
    """nanotron's `moe_config`: a mixture of experts in some layers, routed as in Qwen2-MoE."""

    num_experts: int = key("Experts per layer.", 8, ge=1)
    top_k: int = key("Experts per token.", 2, ge=1)
    moe_intermediate_size: int = key("Width inside an expert.", 1408, ge=1)
    enable_shared_expert: bool = key("A shared expert for every token, weighted by a gate.", False)
    shared_expert_intermediate_size: int = key("Width inside the shared expert.", 5632, ge=1)
    router_aux_loss_coef: float = key(
        "Weight of the load-balancing loss; nanotron has the key and never reads it.", 0.01, ge=0
    )
    layers: list[int] = key("Layers with experts; [-1]: all.", [-1])
    token_dispatcher_type: Literal["alltoall", "allgather"] = key("Accepted for old files.", "alltoall", mark=NO_EFFECT)


class Qwen2Architecture(LlamaStyleArchitecture):
    """The dense Qwen2 family, under Hugging Face's and nanotron's names."""

    not_served: ClassVar[tuple[str, ...]] = (
        "rope_seq_len_interpolation_factor",
        "flex_attention_mask",
        "use_doc_masking",
        "ring_attn_heads_k_stride",
    )

    family: Literal["qwen2"] = our_key("The family's name.", "qwen2")
    is_qwen2_config: bool = key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the query, key and value projections (Hugging Face's Qwen2 has them).", False)
    pretraining_tp: int = key("Accepted for old files.", 1, mark=NO_EFFECT)
    rope_seq_len_interpolation_factor: float | None = key(_UNSERVED, None)
    flex_attention_mask: str | None = key(_UNSERVED, None)
    sliding_window_size: int | None = key(
        "Tokens that a token attends to, besides itself; null: all before it.", None, ge=0
    )
    no_rope_layer: int | None = key("N: every N-th layer has no rotary positions; null: all have.", None, ge=1)
    use_doc_masking: bool = key(_UNSERVED + " (Here: model.document_masking.)", False, alias="_use_doc_masking")
    ring_attn_heads_k_stride: int | None = key(_UNSERVED, None)
    moe_config: NanotronExperts | None = key("A mixture of experts in some layers; null: none.", None)
    fused_rotary_emb: bool = key(_KERNEL, True, alias="_fused_rotary_emb", mark=NO_EFFECT)
    fused_rms_norm: bool = key(_KERNEL, True, alias="_fused_rms_norm", mark=NO_EFFECT)
    use_qkv_packed: bool = key(_KERNEL, True, alias="_use_qkv_packed", mark=NO_EFFECT)
    log_attn_probs: bool = key("Statistics that nanotron sends to W&B.", True, mark=NO_EFFECT)

    def uses_rope(self, layer: int) -> bool:
        """Return whether layer `layer` has RoPE, by `no_rope_layer`."""
        return self.no_rope_layer is None or (layer + 1) % self.no_rope_layer != 0

    @property
    def attention_window(self) -> int | None:
        """The sliding window, which includes the token itself."""
        return None if self.sliding_window_size is None else self.sliding_window_size + 1

    @property
    def experts(self) -> int:
        """The number of experts per layer."""
        return self.moe_config.num_experts if self.moe_config else 0

    @property
    def expert_width(self) -> int:
        """The inner width of an expert."""
        return self.moe_config.moe_intermediate_size if self.moe_config else 0

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the layers with experts."""
        layers = self.moe_config.layers if self.moe_config else []
        return tuple(range(self.num_hidden_layers)) if layers == [-1] else tuple(layers)

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem unless, as in nanotron, `no_rope_layer` divides the number of layers."""
        yield from super().shape_problems()
        if self.no_rope_layer is not None and self.num_hidden_layers % self.no_rope_layer:
            expected = f"expected a divisor of num_hidden_layers {self.num_hidden_layers}, found {self.no_rope_layer}"
            yield "no_rope_layer", expected
        if self.moe_config and self.moe_config.top_k > self.experts:
            yield "moe_config.top_k", f"expected at most num_experts {self.experts}, found {self.moe_config.top_k}"
        if any(not 0 <= layer < self.num_hidden_layers for layer in self.sparse_layers):
            expected = f"expected [-1], or layers from 0 to {self.num_hidden_layers - 1}"
            yield "moe_config.layers", f"{expected}, found {list(self.sparse_layers)}"


class Qwen2(SparseStyle[Qwen2Architecture]):
    """Qwen2, with biases on q, k and v, not on the output projection; experts only with nanotron's `moe_config`."""

    section = Qwen2Architecture
    output_bias = False
    hf_model_type = "qwen2"
    hf_class = "Qwen2ForCausalLM"
    hf_fixed = {"use_sliding_window": False}  # noqa: RUF012

    def routing(self) -> Routing:
        """Return routing by the softmax over all experts, whose weights are not renormalized."""
        from kenotron.models.blocks.moe import Routing

        assert self.config.moe_config is not None
        return Routing(self.config.moe_config.top_k, balance=self.config.moe_config.router_aux_loss_coef)

    def shared_expert(self) -> tuple[nn.Module | None, nn.Module | None]:
        """Return a gated MLP and its gate, if the config has them."""
        experts = self.config.moe_config
        if experts is None or not experts.enable_shared_expert:
            return None, None
        return self.gated_expert(experts.shared_expert_intermediate_size)

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Turn on the biases, which Hugging Face's Qwen2 always has, without a key for them."""
        return values | {"attention_bias": True}

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values for config.json. Raises InputError without biases, or for features of nanotron's Qwen2 only."""
        for name in ("moe_config", "sliding_window_size"):
            if getattr(self.config, name) is not None:
                raise InputError(f"{name}: Hugging Face's Qwen2 has no such layers (qwen2_moe has experts)")
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
