"""The block of OLMo 2: two residual branches, each with its norm after it (Liu et al. 2022, arXiv 2111.09883).

x ──┬─ attention ─ norm ─(+)─┬─ MLP ─ norm ─(+)── x
    └────────────────────────┘└────────────┘
"""

from torch import Tensor, nn

from kenotron.models.context import Context


class PostNormBlock(nn.Module):
    """A block of x ``[tokens, hidden]``. The four modules have the same names as in Hugging Face."""

    def __init__(
        self, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module, post_feedforward: nn.Module
    ) -> None:
        super().__init__()
        self.self_attn, self.post_attention_layernorm = self_attn, post_attention_layernorm
        self.mlp, self.post_feedforward_layernorm = mlp, post_feedforward

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the next hidden states; rope is (cos, sin), each ``[sequences, length, head_dim / 2]``."""
        x = x + self.post_attention_layernorm(self.self_attn(x, rope, ctx))
        return x + self.post_feedforward_layernorm(self.mlp(x))
