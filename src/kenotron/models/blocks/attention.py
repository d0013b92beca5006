"""Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245).

    x ── q_proj ── rope ──┐
      ├─ k_proj ── rope ──┼── ctx.attention ── o_proj ── y
      └─ v_proj ──────────┘

Tokens come flat, ``[tokens, hidden]``; only here do they fold into ``[sequences, heads, length, head_dim]``.
Head counts are read off the width of the local projections, so a tensor-parallel shard with half the columns
simply has half the heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from kenotron.kernels.rope import apply_rope
from kenotron.models.blocks.linear import Linear
from kenotron.models.context import Context


class Attention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        layer: int,
        bias: bool = False,
        rope_interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.layer, self.rope_interleaved = head_dim, layer, rope_interleaved
        self.q_proj = Linear(hidden_size, heads * head_dim, bias)
        self.k_proj = Linear(hidden_size, kv_heads * head_dim, bias)
        self.v_proj = Linear(hidden_size, kv_heads * head_dim, bias)
        self.o_proj = Linear(heads * head_dim, hidden_size, bias)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """x ``[tokens, hidden]``; rope (cos, sin) each ``[sequences, length, head_dim / 2]``."""
        q, k, v = self.q_proj.together(x, self.q_proj, self.k_proj, self.v_proj)
        q = apply_rope(self._heads(q, ctx), *rope, self.rope_interleaved)
        k = apply_rope(self._heads(k, ctx), *rope, self.rope_interleaved)
        v = self._heads(v, ctx)
        y = ctx.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), ctx, self.layer)
        return self.o_proj(y.transpose(1, 2).flatten(2).flatten(0, 1))

    def _heads(self, x: Tensor, ctx: Context) -> Tensor:
        sequences, length = ctx.shape
        return x.view(sequences, length, -1, self.head_dim)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Scores and weighted sum, each 2 * length * width; a causal mask needs half of the square."""
        square = 4.0 * sequence_length * self.q_proj.weight.shape[0]
        return square / 2 if causal else square
