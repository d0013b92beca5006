"""DeepSeek-V3 (arXiv 2412.19437): latent attention, and many small experts that are chosen by groups and biases.

The first layers are dense. A token's experts come from its best groups of experts (on a cluster, from few machines).
The bias of an expert, which no gradient reaches, influences which experts are chosen, but not their weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kenotron.config.decoder import Problem
from kenotron.config.section import key, our_key
from kenotron.models.families.llama import ATTENTION
from kenotron.models.families.mixtral import BiasedMixtureArchitecture, SparseArchitecture, SparseStyle
from kenotron.models.family import EMBEDDING, HEAD

if TYPE_CHECKING:
    from torch import Tensor, nn


class DeepseekV3Architecture(BiasedMixtureArchitecture, SparseArchitecture):
    """The DeepSeek-V3 family, under Hugging Face's names."""

    not_served: ClassVar[tuple[str, ...]] = ("rope_interleaved", "free_head_dim")
    experts_key = "n_routed_experts"
    # Another value means another model for weights of the same shapes: weights are not reordered for it.
    shape_keys: ClassVar[tuple[str, ...]] = (*SparseArchitecture.shape_keys, "rope_interleave")

    family: Literal["deepseek_v3"] = our_key("The family's name.", "deepseek_v3")
    is_deepseek_v3_config: bool = our_key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the down-projections to latents and on the output projection.", False)
    q_lora_rank: int | None = key("Rank of the latent that queries are projected from; null: no latent.", 1536, ge=1)
    kv_lora_rank: int = key("Rank of the latent that keys and values are projected from.", 512, ge=1)
    qk_nope_head_dim: int = key("Channels of a query or key head without positions.", 128, ge=1)
    qk_rope_head_dim: int = key("Channels of a query or key head with rotary positions.", 64, ge=2)
    v_head_dim: int = key("Channels of a value head.", 128, ge=1)
    rope_interleave: bool = key("Rotate neighbouring pairs instead of the two halves.", True)
    first_k_dense_replace: int = key("Layers at the start with a plain MLP.", 3, ge=0)
    n_routed_experts: int = key("Experts per layer.", 256, ge=1)
    n_shared_experts: int = key("Width of the shared expert, as a multiple of moe_intermediate_size.", 1, ge=1)
    num_experts_per_tok: int = key("Experts per token.", 8, ge=1)
    moe_intermediate_size: int = key("Width inside an expert.", 2048, ge=1)
    n_group: int = key("Groups that the experts are divided into.", 8, ge=1)
    topk_group: int = key("Groups that a token's experts are chosen from.", 4, ge=1)
    routed_scaling_factor: float = key("Factor on the weights of a token's experts.", 2.5, gt=0)
    router_aux_loss_coef: float = key("Weight of the load-balancing loss.", 0.0001, ge=0)
    num_nextn_predict_layers: int = key(
        "Blocks after the last layer, each of which learns to predict one token further; generation does without.",
        0,
        ge=0,
    )
    next_token_loss_weight: float = our_key("Weight of the mean of their losses.", 0.3, ge=0)

    @property
    def next_token_layers(self) -> range:
        """Return the numbers of the `num_nextn_predict_layers` blocks after the layers."""
        return range(self.num_hidden_layers, self.num_hidden_layers + self.num_nextn_predict_layers)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the layers after the dense ones, and the blocks that predict further tokens."""
        return (*range(self.first_k_dense_replace, self.num_hidden_layers), *self.next_token_layers)

    @property
    def head_dim(self) -> int:
        """The number of channels of one head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that RoPE rotates: the last ones."""
        return self.qk_rope_head_dim

    def head_dim_problems(self) -> Iterator[Problem]:
        """Yield a problem if RoPE cannot rotate pairs of channels; the widths of heads are free otherwise."""
        if self.qk_rope_head_dim % 2:
            yield "qk_rope_head_dim", f"expected an even number, found {self.qk_rope_head_dim}"

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem unless every query head has its own keys."""
        yield from super().shape_problems()
        if self.kv_heads != (heads := self.num_attention_heads):
            yield "num_key_value_heads", f"expected null or num_attention_heads {heads}, found {self.kv_heads}"

    def pp_problems(self, pp: int) -> Iterator[str]:
        """Yield a problem for blocks that predict further tokens, which need both the embedding and the head."""
        if pp > 1 and self.num_nextn_predict_layers:
            yield f"expected 1 with num_nextn_predict_layers, which needs the embedding beside the head; found {pp}"

    def cp_problems(self, cp: int, tp: int, method: str, lengths: Mapping[str, int]) -> Iterator[str]:
        """Yield a problem for blocks that predict further tokens, since the next token may be on another rank."""
        yield from super().cp_problems(cp, tp, method, lengths)
        if self.num_nextn_predict_layers:
            yield f"expected 1 with num_nextn_predict_layers, whose tokens' next ones are other ranks'; found {cp}"


class DeepseekV3(SparseStyle[DeepseekV3Architecture]):
    """DeepSeek-V3, whose shared expert has no gate."""

    section = DeepseekV3Architecture
    hf_model_type = "deepseek_v3"
    hf_class = "DeepseekV3ForCausalLM"
    hf_fixed = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}  # noqa: RUF012
    hf_names = {  # noqa: RUF012
        ".shared_expert.": ".shared_experts.",
        ".kv_a_proj.": ".kv_a_proj_with_mqa.",
        ".k_rope_proj.": ".kv_a_proj_with_mqa.",
    }
    hf_fp32 = ("e_score_correction_bias",)

    def __init__(self, config: DeepseekV3Architecture) -> None:
        super().__init__(config)
        q = ("q_proj",) if config.q_lora_rank is None else ("q_b_proj",)
        short = ("kv_a_proj", "kv_a_layernorm", *(() if config.q_lora_rank is None else ("q_a_proj", "q_a_layernorm")))
        mlp = tuple(name for name in self.plan.column if ".mlp." in name)
        self.plan = replace(
            self.plan,
            column=(*(f"{ATTENTION}.{name}" for name in (*q, "kv_b_proj", "k_rope_proj")), *mlp),
            kv=(f"{ATTENTION}.k_rope_proj",),  # one key head, which the heads of every rank use
            sequence=(*self.plan.sequence, *(f"{ATTENTION}.{name}" for name in short)),
        )
        if config.next_token_layers:
            further = (f"model.layers.*.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
            self.plan = replace(self.plan, sequence=(*self.plan.sequence, *further))

    def block(self, layer: int) -> nn.Module:
        """Make layer number `layer`, or one that predicts a further token."""
        from kenotron.models.blocks.moe import MoEBlock
        from kenotron.models.blocks.next_token import NextTokenBlock

        block, config = super().block(layer), self.config
        if layer not in config.next_token_layers:
            return block
        assert isinstance(block, MoEBlock)
        norms = self.final_norm(), self.final_norm(), self.final_norm()
        return NextTokenBlock(block, norms, config.hidden_size, config.vocab_size)

    def attention(self, layer: int) -> nn.Module:
        """Return the attention module of layer `layer`."""
        from kenotron.models.blocks.latent_attention import LatentAttention
        from kenotron.models.blocks.rope import yarn_temperature

        config, scaling = self.config, self.config.rope_scaling or {}
        temperature = yarn_temperature(scaling, scaling["mscale_all_dim"]) if scaling.get("mscale_all_dim") else 1.0
        return LatentAttention(
            config.hidden_size,
            config.num_attention_heads,
            q_rank=config.q_lora_rank,
            kv_rank=config.kv_lora_rank,
            still=config.qk_nope_head_dim,
            turning=config.qk_rope_head_dim,
            v_dim=config.v_head_dim,
            bias=config.attention_bias,
            rope_interleaved=config.rope_interleave,
            scale=config.head_dim**-0.5 * temperature**2,
        )

    def shared_expert(self) -> tuple[nn.Module, None]:
        """Return a gated MLP as wide as `n_shared_experts` experts, without a gate on its output."""
        return self.gated_mlp(self.config.n_shared_experts * self.config.expert_width), None

    @classmethod
    def from_hf(cls, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        """Drop `head_dim`, a copy of qk_rope_head_dim; for num_nextn_predict_layers see `as_saved`."""
        return {name: value for name, value in values.items() if name not in ("head_dim", "num_nextn_predict_layers")}

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return values for config.json, the inverse of `from_hf`."""
        return values | {"head_dim": self.config.qk_rope_head_dim}

    def as_saved(self, config: Mapping[str, Any], tensors: Container[str]) -> DeepseekV3Architecture:
        """Count the blocks for further tokens that have tensors: transformers writes a number for any model."""
        if f"model.layers.{self.config.num_hidden_layers}.eh_proj.weight" not in tensors:
            return self.config
        return self.config.model_copy(update={"num_nextn_predict_layers": config.get("num_nextn_predict_layers", 1)})

    def hf_copies(self) -> dict[str, str]:
        """Return the copies of embedding and head in the blocks that predict further tokens."""
        head = EMBEDDING if self.config.tie_word_embeddings else HEAD
        copies = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": head}
        layers = self.config.next_token_layers
        return {f"model.layers.{layer}.{copy}": name for layer in layers for copy, name in copies.items()}

    def hf_split(self, hf_name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Split the joint projection into the latent's and the RoPE keys'."""
        return tensor.split((self.config.kv_lora_rank, self.config.qk_rope_head_dim))
