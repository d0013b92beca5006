"""The block of GPT-NeoX and GPT-J: attention and feed-forward read the same residual stream, side by side.

x ──┬─ norm ─ attention ─(+)── x
    └─ norm ─ MLP ────────┘
"""

from torch import Tensor

from kenotron.models.blocks.pre_norm import PreNormBlock
from kenotron.models.context import Context


class ParallelResidualBlock(PreNormBlock):
    """A block of x ``[tokens, hidden]``; its modules and their names are those of `PreNormBlock`."""

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the next hidden states; rope is (cos, sin), each ``[sequences, length, rotary_dim / 2]``."""
        return x + self.self_attn(self.input_layernorm(x), rope, ctx) + self.mlp(self.post_attention_layernorm(x))
