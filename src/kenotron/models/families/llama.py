"""Llama (Touvron et al. 2023, arXiv 2302.13971; 3: arXiv 2407.21783).

    tokens ── embed ──┬─ norm ─ attention ─(+)─┬─ norm ─ gated MLP ─(+)── … ── norm ── head ── loss
                      └────────────────────────┘└───────────────────┘

Names are Hugging Face's, so checkpoints convert tensor by tensor in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from kenotron.config.decoder import RopeArchitecture
from kenotron.config.section import EXPORT, key, our_key
from kenotron.models.family import Family
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    from torch import nn

ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"


class LlamaStyleArchitecture(RopeArchitecture):
    """A decoder with rotary positions and RMSNorm."""

    rms_norm_eps: float = key("Added to the mean square inside RMSNorm.", 1e-6, gt=0)

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Return the layers with experts; the others have a plain gated MLP."""
        return ()

    def tp_problems(self, tp: int) -> Iterator[str]:
        """Yield a problem unless tp divides the width of experts."""
        yield from super().tp_problems(tp)
        if self.expert_width % tp:
            yield f"expected a divisor of the width of an expert, {self.expert_width}, found {tp}"


class LlamaArchitecture(LlamaStyleArchitecture):
    """The Llama family, under Hugging Face's names."""

    family: Literal["llama"] = our_key("The family's name.", "llama")
    is_llama_config: bool = key("Marks the family; its value changes nothing.", True)
    attention_bias: bool = key("Biases on the attention projections.", False)
    pretraining_tp: int = key("Written to the export.", 1, mark=EXPORT)


C = TypeVar("C", bound=LlamaStyleArchitecture)


class LlamaStyle(Family[C]):
    """The code that Llama and its relatives share; most differ in their attention."""

    output_bias: ClassVar[bool] = True
    """Whether the output projection has a bias if queries, keys and values have one."""
    qk_norm: ClassVar[Literal["heads", "all"] | None] = None
    """RMSNorms of queries and of keys, of each head separately or of all heads together; None: no norms."""

    plan = Plan(
        blocks="model.layers.*",
        column=(*(f"{ATTENTION}.{part}_proj" for part in "qkv"), f"{MLP}.gate_proj", f"{MLP}.up_proj"),
        kv=tuple(f"{ATTENTION}.{part}_proj" for part in "kv"),
        row=(f"{ATTENTION}.o_proj", f"{MLP}.down_proj"),
        vocab=("model.embed_tokens", "lm_head"),
        sequence=("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"),
    )

    def attention(self, layer: int) -> nn.Module:
        """Return the attention of layer `layer`, with biases as `attention_bias` says."""
        from kenotron.models.blocks.attention import Attention
        from kenotron.models.blocks.norm import HeadRMSNorm, RMSNorm

        config, bias = self.config, getattr(self.config, "attention_bias", False)
        norms: dict[str, nn.Module] = {}
        for name, heads in ("q_norm", config.num_attention_heads), ("k_norm", config.kv_heads):
            if self.qk_norm == "heads":
                norms[name] = HeadRMSNorm(config.head_dim, config.rms_norm_eps)
            elif self.qk_norm == "all":
                norms[name] = RMSNorm(heads * config.head_dim, config.rms_norm_eps)
        return Attention.of(config, layer, qkv_bias=bias, output_bias=bias and self.output_bias, **norms)

    def block(self, layer: int) -> nn.Module:
        """Return the block ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""
        from kenotron.models.blocks.pre_norm import PreNormBlock

        mlp = self.gated_mlp(self.config.intermediate_size)
        return PreNormBlock(self.final_norm(), self.attention(layer), self.final_norm(), mlp)

    def gated_mlp(self, width: int) -> nn.Module:
        """Return a gated MLP with the inner width `width`."""
        from kenotron.models.blocks.mlp import GatedMLP

        return GatedMLP(self.config.hidden_size, width, self.config.hidden_act)

    def final_norm(self) -> nn.Module:
        """Return an RMSNorm, as before attention and MLP."""
        from kenotron.models.blocks.norm import RMSNorm

        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def positions(self) -> nn.Module:
        """Return the module for RoPE."""
        from kenotron.models.blocks.rope import Rope

        return Rope.of(self.config)


# The plan of relatives whose feed-forward has no gate.
UNGATED_COLUMNS = tuple(name for name in LlamaStyle.plan.column if not name.endswith("gate_proj"))


class Llama(LlamaStyle[LlamaArchitecture]):
    """Llama, with the blocks of `LlamaStyle` unchanged."""

    section = LlamaArchitecture
    hf_model_type = "llama"
    hf_class = "LlamaForCausalLM"
    hf_fixed = {"mlp_bias": False}  # noqa: RUF012
