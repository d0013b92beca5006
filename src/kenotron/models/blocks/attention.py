"""Grouped-query self-attention (Ainslie et al. 2023, arXiv 2305.13245).

    x ── q_proj ── norm ── rope ──┐
      ├─ k_proj ── norm ── rope ──┼── ctx.attention ── o_proj ── y         the norms where a family has them
      └─ v_proj ────── (+) ───────┘                                        rope in layers with positions
         value_embedding ┘                                                 in layers that have one

Tokens come flat, ``[tokens, hidden]``; only here do they fold into ``[sequences, heads, length, head_dim]``.
Head counts are read off the width of the local projections, so a tensor-parallel shard with half the columns
simply has half the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kenotron.config.decoder import RopeArchitecture
from kenotron.kernels.rope import apply_rope_to_both
from kenotron.models.blocks.linear import Linear
from kenotron.models.context import Context


class Attention(nn.Module):
    """Query, key, value and output projections around the attention function of the context.

    `rotary`: whether queries and keys are rotated by their positions. `window`: the number of tokens that a token
    attends to, itself included; None: all up to it. `q_norm`, `k_norm` normalize queries and keys ``[tokens, heads *
    head_dim]``. `value_embedding` has a row per token id, as wide as the values, which is added to them after scaling
    each head by ``2 sigmoid(value_gate(x))``.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        rotary: bool = True,
        rope_interleaved: bool = False,
        window: int | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        value_embedding: nn.Module | None = None,
        value_gate: Linear | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.window = head_dim, window
        self.rotary, self.rope_interleaved = rotary, rope_interleaved
        self.q_proj = Linear(hidden_size, heads * head_dim, qkv_bias)
        self.k_proj = Linear(hidden_size, kv_heads * head_dim, qkv_bias)
        self.v_proj = Linear(hidden_size, kv_heads * head_dim, qkv_bias)
        self.o_proj = Linear(heads * head_dim, hidden_size, output_bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.value_embedding, self.value_gate = value_embedding, value_gate

    @staticmethod
    def of(config: RopeArchitecture, layer: int, **options: Any) -> Attention:
        """Build the attention of a section; `options` of the constructor are biases, norms, value embeddings."""
        return Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_dim,
            rotary=config.uses_rope(layer),
            rope_interleaved=config.rope_interleaved,
            window=config.attention_window,
            **options,
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the output of x ``[tokens, hidden]``; rope: (cos, sin), each ``[sequences, length, head_dim / 2]``."""
        gate = () if self.value_gate is None else (self.value_gate,)
        q, k, v, *gates = self.q_proj.grouped(x, self.q_proj, self.k_proj, self.v_proj, *gate)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        q, k, v = self._heads(q, ctx), self._heads(k, ctx), self._heads(v, ctx)
        if self.value_embedding is not None:
            gates_of_heads = 2 * torch.sigmoid(gates[0]).view(*v.shape[:3], 1)
            v = v + gates_of_heads * self._heads(self.value_embedding(ctx.tokens).to(v.dtype), ctx)
        if self.rotary:
            q, k = apply_rope_to_both(q, k, *rope, self.rope_interleaved)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = ctx.attention(q, k, v, ctx, self, window=self.window)
        return self.o_proj(y.transpose(1, 2).flatten(2).flatten(0, 1))

    def _heads(self, x: Tensor, ctx: Context) -> Tensor:
        sequences, length = ctx.shape
        return x.view(sequences, length, -1, self.head_dim)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of scores and weighted sum, each 2 * length * width; a causal mask needs half of them.

        With a window w, a token attends on average to w - w (w - 1) / (2 length) tokens: fewer at the start.
        """
        width = 4.0 * self.q_proj.weight.shape[0]
        if causal and self.window is not None and self.window < sequence_length:
            return width * (self.window - self.window * (self.window - 1) / (2 * sequence_length))
        return width * sequence_length / 2 if causal else width * sequence_length
