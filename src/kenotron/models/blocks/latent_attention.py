"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads from one low-rank latent.

    x ─┬─ q_a_proj ─ norm ─ q_b_proj ─── q: a part without positions, a part with rope ─┐
       ├─ kv_a_proj ─ norm ─ kv_b_proj ─┬─ k: the part without positions ─┐             ├─ ctx.attention ─ o_proj
       │                                └─ v ─────────────────────────────┼─────────────┤
       └─ k_rope_proj ─ rope ───────────── k: the part with, of all heads ┴─────────────┘

Without a rank for queries, they are q_proj(x). Scores are products over both parts. If heads of v have another width
than heads of q and k, the shorter ones are padded with zeros, so that every attention function (a ring, a KV cache, a
kernel) accepts them; zeros change no score, and their outputs are cut off.

Tensor parallelism splits the heads. The projections to the latents serve all heads, so every rank has all of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels.rope import apply_rope
from kenotron.models.blocks.linear import Linear
from kenotron.models.blocks.norm import RMSNorm
from kenotron.models.context import Context

EPS = 1e-6  # of both norms, independent of rms_norm_eps, as in transformers


class LatentAttention(nn.Module):
    """Attention of x ``[tokens, hidden]``, with a result of the same shape.

    `still`, `turning`: channels of a head of queries and keys without and with RoPE; `v_dim`: channels of a value head.
    `q_rank`, `kv_rank`: widths of the latents; None: queries have none. `scale` multiplies the scores.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        q_rank: int | None,
        kv_rank: int,
        still: int,
        turning: int,
        v_dim: int,
        bias: bool,
        rope_interleaved: bool,
        scale: float,
    ) -> None:
        super().__init__()
        self.scale, self.rope_interleaved = scale, rope_interleaved
        self.still, self.turning, self.v_dim = still, turning, v_dim
        qk_dim = still + turning
        if q_rank is None:
            self.q_proj = Linear(hidden_size, heads * qk_dim, together=qk_dim)
        else:
            self.q_a_proj = Linear(hidden_size, q_rank, bias)
            self.q_a_layernorm = RMSNorm(q_rank, EPS)
            self.q_b_proj = Linear(q_rank, heads * qk_dim, together=qk_dim)
        self.kv_a_proj = Linear(hidden_size, kv_rank, bias)
        self.k_rope_proj = Linear(hidden_size, turning, bias, together=turning)
        self.kv_a_layernorm = RMSNorm(kv_rank, EPS)
        self.kv_b_proj = Linear(kv_rank, heads * (still + v_dim), together=still + v_dim)
        self.o_proj = Linear(heads * v_dim, hidden_size, bias, together=v_dim)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the output of x ``[tokens, hidden]``; rope: (cos, sin), each ``[sequences, length, turning / 2]``."""
        if hasattr(self, "q_proj"):
            q, k_turning = self.q_proj.grouped(x, self.q_proj, self.k_rope_proj)
        else:
            q, k_turning = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))), self.k_rope_proj(x)
        kv = self.kv_b_proj(self.kv_a_layernorm(self.kv_a_proj(x)))
        q_still, q_turning = _heads(q, self.still + self.turning, ctx).split((self.still, self.turning), dim=-1)
        k_still, v = _heads(kv, self.still + self.v_dim, ctx).split((self.still, self.v_dim), dim=-1)
        k_turning = apply_rope(_heads(k_turning, self.turning, ctx), *rope, self.rope_interleaved)
        q = torch.cat((q_still, apply_rope(q_turning, *rope, self.rope_interleaved)), dim=-1)
        k = torch.cat((k_still, k_turning.expand(-1, -1, k_still.shape[2], -1)), dim=-1)
        width = max(self.still + self.turning, self.v_dim)
        q, k, v = (F.pad(part, (0, width - part.shape[-1])).transpose(1, 2) for part in (q, k, v))
        y = ctx.attention(q, k, v, ctx, self, self.scale)[..., : self.v_dim]
        return self.o_proj(y.transpose(1, 2).flatten(2).flatten(0, 1))

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of scores and weighted sum, without the padding; a causal mask needs half of them."""
        heads = self.kv_b_proj.weight.shape[0] // (self.still + self.v_dim)
        width = 2.0 * heads * (self.still + self.turning + self.v_dim)
        return width * sequence_length / 2 if causal else width * sequence_length


def _heads(x: Tensor, width: int, ctx: Context) -> Tensor:
    """Return ``[tokens, heads * width]`` as ``[sequences, length, heads, width]``."""
    return x.view(*ctx.shape, -1, width)
