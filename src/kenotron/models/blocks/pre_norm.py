"""The block of Llama and its relatives: two residual branches, each with its norm before it.

x ──┬─ norm ─ attention ─(+)─┬─ norm ─ MLP ─(+)── x
    └────────────────────────┘└────────────┘
"""

from torch import Tensor, nn

from kenotron.models.context import Context


class PreNormBlock(nn.Module):
    """A block of x ``[tokens, hidden]``. The four modules have the same names as in Hugging Face."""

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = input_layernorm, self_attn
        self.post_attention_layernorm, self.mlp = post_attention_layernorm, mlp

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the next hidden states; rope is (cos, sin), each ``[sequences, length, head_dim / 2]``."""
        x = x + self.self_attn(self.input_layernorm(x), rope, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))
