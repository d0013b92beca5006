"""StarCoder2 (Lozhkov et al. 2024, arXiv 2402.19173): LayerNorms, biases everywhere, a feed-forward without a gate.

    x ──┬─ LayerNorm ─ attention ─(+)─┬─ LayerNorm ─ up ─ GELU ─ down ─(+)── x
        └─────────────────────────────┘└───────────────────────────────┘

Few key and value heads, or one (arXiv 1911.02150), and a sliding window. Defaults and alternative keys are those of
nanotron, which trained the published models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator

from kenotron.config.decoder import Problem, RopeArchitecture
from kenotron.config.section import NO_EFFECT, key, our_key
from kenotron.models.families.llama import UNGATED_COLUMNS, LlamaStyle
from kenotron.models.family import Family

if TYPE_CHECKING:
    from torch import nn

_UNSERVED = "Known from nanotron; only its default is supported."
_DROPOUT = "Dropout of nanotron's, where its default is 0.1; only 0 is supported."


class Starcoder2Architecture(RopeArchitecture):
    """The StarCoder2 family, under Hugging Face's and nanotron's names."""

    not_served: ClassVar[tuple[str, ...]] = (
        "attn_pdrop",
        "embd_pdrop",
        "resid_pdrop",
        "global_attn_layers",
        "use_position_embeddings",
        "use_rotary_embeddings",
        "scale_attn_weights",
        "attention_softmax_in_fp32",
        "scale_attention_softmax_in_fp32",
    )
    other_names: ClassVar[dict[str, str]] = {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "norm_epsilon",
        "num_kv_heads": "num_key_value_heads",
        "sliding_window_size": "sliding_window",
    }

    family: Literal["starcoder2"] = our_key("The family's name.", "starcoder2")
    is_starcoder2_config: bool = key("Marks the family; its value changes nothing.", True)
    bos_token_id: int = key("Token that starts a generated text.", 49152, ge=0)
    eos_token_id: int = key("Token that ends a text.", 49152, ge=0)
    hidden_act: str = key("Activation of the feed-forward (activation_function).", "gelu_pytorch_tanh")
    hidden_size: int = key("Width of the residual stream.", 2048, ge=1)
    intermediate_size: int = key(
        "Width inside the feed-forward; null: 4 * hidden_size.", None, ge=1, validate_default=True
    )
    max_position_embeddings: int = key("Context length that the export names.", 4096, ge=1)
    num_attention_heads: int = key("Query heads.", 16, ge=1)
    num_hidden_layers: int = key("Layers.", 24, ge=1)
    num_key_value_heads: int | None = key("Key and value heads (num_kv_heads); null: one.", None, ge=1)
    tie_word_embeddings: bool = key("One matrix for the embedding and the output layer.", True)
    vocab_size: int = key("Rows of the embedding before padding.", 49280, ge=1)
    norm_epsilon: float = our_key("Added to the variance inside LayerNorm (layer_norm_epsilon).", 1e-5, gt=0)
    use_bias: bool = our_key("Biases on all projections.", True)
    sliding_window: int | None = our_key(
        "Tokens that a token attends to, itself included (sliding_window_size); null: all.", None, ge=1
    )
    grouped_query: bool = key(
        "nanotron's flag for several key and value heads; needs num_kv_heads.", False, mark=NO_EFFECT
    )
    multi_query: bool = key("nanotron's flag for one key and value head, which is the default.", False, mark=NO_EFFECT)
    attn_pdrop: float = key(_DROPOUT, 0.0)
    embd_pdrop: float = key(_DROPOUT, 0.0)
    resid_pdrop: float = key(_DROPOUT, 0.0)
    global_attn_layers: list[int] = key(_UNSERVED, [])
    use_position_embeddings: bool = key(_UNSERVED, False)
    use_rotary_embeddings: bool = key(_UNSERVED, True)
    scale_attn_weights: bool = key(_UNSERVED, True)
    attention_softmax_in_fp32: bool = key(_UNSERVED, True)
    scale_attention_softmax_in_fp32: bool = key(_UNSERVED, True)

    @field_validator("intermediate_size", mode="before")
    @classmethod
    def _four_times_the_width(cls, value: Any, info: ValidationInfo) -> Any:
        return 4 * info.data.get("hidden_size", 1) if value is None else value

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads, one by default."""
        return self.num_key_value_heads or 1

    def shape_problems(self) -> Iterator[Problem]:
        """Yield a problem unless nanotron's two flags agree with the number of key and value heads."""
        yield from super().shape_problems()
        if self.grouped_query and self.num_key_value_heads is None:
            yield "num_kv_heads", "missing: grouped_query needs it"
        if self.multi_query and (self.kv_heads > 1 or self.grouped_query):
            found = f"{self.kv_heads} key and value heads" if self.kv_heads > 1 else "grouped_query: true"
            yield "multi_query", f"means one key and value head; expected false with {found}"


class Starcoder2(Family[Starcoder2Architecture]):
    """StarCoder2: a Llama's residual branches with other norms and another feed-forward."""

    section = Starcoder2Architecture
    plan = replace(LlamaStyle.plan, column=UNGATED_COLUMNS)
    positions = LlamaStyle.positions
    hf_model_type = "starcoder2"
    hf_class = "Starcoder2ForCausalLM"
    hf_names = {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}  # noqa: RUF012

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`."""
        from kenotron.models.blocks.attention import Attention
        from kenotron.models.blocks.mlp import MLP
        from kenotron.models.blocks.pre_norm import PreNormBlock

        config, bias = self.config, self.config.use_bias
        attention = Attention.of(config, layer, qkv_bias=bias, output_bias=bias)
        mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias)
        return PreNormBlock(self.final_norm(), attention, self.final_norm(), mlp)

    def final_norm(self) -> nn.Module:
        """Return a LayerNorm, as before attention and feed-forward."""
        from kenotron.models.blocks.norm import LayerNorm

        return LayerNorm(self.config.hidden_size, self.config.norm_epsilon)
