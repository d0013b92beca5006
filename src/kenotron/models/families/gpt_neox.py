"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745), also Pythia (arXiv 2304.01373): parallel residual branches.

    x ──┬─ LayerNorm ─ attention ───────────────(+)── x
        └─ LayerNorm ─ up ─ GELU ─ down ─────────┘

Rotary positions rotate the first quarter of a head's channels (`rotary_pct`) and leave the others as they are. Hugging
Face keeps queries, keys and values in one matrix, head by head: q0 k0 v0 q1 k1 v1 …
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from kenotron.config.decoder import Problem, RopeArchitecture
from kenotron.config.errors import InputError
from kenotron.config.section import key, our_key
from kenotron.models.families.starcoder2 import Starcoder2
from kenotron.models.family import Family

if TYPE_CHECKING:
    from torch import Tensor, nn


class GPTNeoXArchitecture(RopeArchitecture):
    """The GPT-NeoX family, under Hugging Face's names."""

    family: Literal["gpt_neox"] = our_key("The family's name.", "gpt_neox")
    is_gpt_neox_config: bool = our_key("Marks the family; its value changes nothing.", True)
    hidden_act: str = key("Activation of the feed-forward.", "gelu")
    layer_norm_eps: float = our_key("Added to the variance inside LayerNorm.", 1e-5, gt=0)
    attention_bias: bool = key("Biases on the attention projections.", True)
    use_parallel_residual: bool = our_key("Attention and feed-forward side by side; false: in sequence.", True)
    rotary_pct: float = our_key("Fraction of a head's channels with rotary positions.", 0.25, gt=0, le=1)

    @property
    def rotary_factor(self) -> float:
        """The fraction of a head's channels that is rotated: `rotary_pct`."""
        return self.rotary_pct

    def head_dim_problems(self) -> Iterator[Problem]:
        """Yield a problem unless the rotated channels are pairs."""
        yield from super().head_dim_problems()
        turning = self.rotary_dim
        if turning % 2 or turning == 0:
            found = f"{self.rotary_pct:g} of {self.head_dim}, which is {turning}"
            yield "rotary_pct", f"expected an even number of a head's channels, found {found}"


class GPTNeoX(Family[GPTNeoXArchitecture]):
    """GPT-NeoX, whose linears and norms are split like StarCoder2's."""

    section = GPTNeoXArchitecture
    plan = Starcoder2.plan
    positions = Starcoder2.positions  # on some channels of every head
    hf_model_type = "gpt_neox"
    hf_class = "GPTNeoXForCausalLM"
    hf_names = {  # noqa: RUF012
        "lm_head": "embed_out",
        "model.embed_tokens": "gpt_neox.embed_in",
        "model.norm": "gpt_neox.final_layer_norm",
        "model.layers": "gpt_neox.layers",
        "self_attn.q_proj": "attention.query_key_value",
        "self_attn.k_proj": "attention.query_key_value",
        "self_attn.v_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    hf_unread = (".attention.bias", ".attention.masked_bias")

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`."""
        from kenotron.models.blocks.attention import Attention
        from kenotron.models.blocks.mlp import MLP
        from kenotron.models.blocks.parallel_residual import ParallelResidualBlock
        from kenotron.models.blocks.pre_norm import PreNormBlock

        config, bias = self.config, self.config.attention_bias
        block = ParallelResidualBlock if config.use_parallel_residual else PreNormBlock
        attention = Attention.of(config, layer, qkv_bias=bias, output_bias=bias)
        mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        return block(self.final_norm(), attention, self.final_norm(), mlp)

    def final_norm(self) -> nn.Module:
        """Return a LayerNorm, as before attention and feed-forward."""
        from kenotron.models.blocks.norm import LayerNorm

        return LayerNorm(self.config.hidden_size, self.config.layer_norm_eps)

    def to_hf(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add `rotary_emb_base`, rope_theta's name before transformers 5. Raises InputError for a free `head_dim`."""
        width, share = self.config.head_dim, self.config.hidden_size / self.config.num_attention_heads
        if width != share:
            raise InputError(
                f"head_dim: {width}: Hugging Face's GPT-NeoX has hidden_size / num_attention_heads = {share:g}"
            )
        return values | {"rotary_emb_base": self.config.rope_theta}

    def hf_join(self, hf_name: str, parts: Sequence[Tensor]) -> Tensor:
        """Interleave the rows of q, k and v head by head."""
        import torch

        heads = self.config.num_attention_heads
        return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)

    def hf_split(self, hf_name: str, tensor: Tensor) -> Sequence[Tensor]:
        """Return the pieces, the inverse of `hf_join`."""
        heads = tensor.unflatten(0, (self.config.num_attention_heads, 3, -1))
        return [part.flatten(0, 1) for part in heads.unbind(1)]
