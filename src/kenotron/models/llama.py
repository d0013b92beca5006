"""Llama (Touvron et al. 2023, arXiv 2302.13971; 3: arXiv 2407.21783): maths first, then the plan.

    tokens ── embed ──┬─ norm ─ attention ─(+)─┬─ norm ─ gated MLP ─(+)── … ── norm ── head ── loss
                      └────────────────────────┘└───────────────────┘

Names are Hugging Face's, so a checkpoint of either loads into the other tensor by tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kenotron.models.blocks.attention import Attention
from kenotron.models.blocks.head import LMHead
from kenotron.models.blocks.linear import Embedding
from kenotron.models.blocks.mlp import GatedMLP
from kenotron.models.blocks.norm import RMSNorm
from kenotron.models.blocks.rope import Rope
from kenotron.models.context import Context
from kenotron.models.family import LanguageModel
from kenotron.models.initialization import Constant, InitRule, Normal
from kenotron.models.part import Part
from kenotron.models.plan import Plan

if TYPE_CHECKING:
    from kenotron.config.architecture import LlamaArchitecture


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaArchitecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_dim,
            layer,
            config.attention_bias,
            config.rope_interleaved,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, ctx)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """Everything below the head: tokens ``[tokens]`` → hidden states ``[tokens, hidden]``.

    A part without the embedding reads hidden states; one without the head leaves them as the next part wants them.
    """

    def __init__(self, config: LlamaArchitecture, rows: int, part: Part) -> None:
        super().__init__()
        self.embed_tokens = Embedding(rows, config.hidden_size) if part.first else None
        self.layers = nn.ModuleDict({str(layer): LlamaBlock(config, layer) for layer in part.layers})
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if part.last else None
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings)
        self.recompute = False
        self.compute_dtype = torch.float32

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x).to(self.compute_dtype)
        rope = self.rope(ctx.positions.view(ctx.shape))
        for block in self.layers.values():
            if self.recompute and self.training:
                x = checkpoint(block, x, rope, ctx, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rope, ctx)
        return x if self.norm is None else self.norm(x)


class Llama(LanguageModel):
    """``model(tokens, ctx)`` → logits ``[tokens, vocab]``; ``model(tokens, ctx, labels)`` → (loss, z_loss).

    A `part` (of a pipeline) that is not first takes hidden states in the place of tokens, one that is not last
    returns hidden states.
    """

    def __init__(self, config: LlamaArchitecture, vocab_multiple: int = 1, part: Part | None = None) -> None:
        super().__init__()
        part = part or Part.whole(config.num_hidden_layers)
        rows = math.ceil(config.vocab_size / vocab_multiple) * vocab_multiple
        z_loss = config.z_loss_coefficient if config.z_loss_enabled else 0.0
        self.config, self.part = config, part
        self.model = LlamaModel(config, rows, part)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, rows, z_loss) if part.last else None
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.tie(self.model.embed_tokens.weight)

    def ties(self) -> dict[str, str]:
        """The head and its owner, wherever they live: {"lm_head.weight": "model.embed_tokens.weight"}."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def tied_copies(self) -> dict[str, str]:
        """The head of a part whose embedding lives in another one."""
        return self.ties() if self.part.last and not self.part.first else {}

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        self.model.compute_dtype = dtype

    def set_recompute(self, recompute: bool) -> None:
        self.model.recompute = recompute

    def forward(self, tokens: Tensor, ctx: Context, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        hidden = self.model(tokens, ctx)
        return hidden if self.lm_head is None else self.lm_head(hidden, ctx, labels)

    # The plan: how the maths above may be split. Data, read by the parallel room.
    plan = Plan(
        blocks="model.layers.*",
        column=(
            "model.layers.*.self_attn.q_proj",
            "model.layers.*.self_attn.k_proj",
            "model.layers.*.self_attn.v_proj",
            "model.layers.*.mlp.gate_proj",
            "model.layers.*.mlp.up_proj",
        ),
        kv=("model.layers.*.self_attn.k_proj", "model.layers.*.self_attn.v_proj"),
        row=("model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"),
        vocab=("model.embed_tokens", "lm_head"),
        sequence=(
            "model.layers.*.input_layernorm",
            "model.layers.*.post_attention_layernorm",
            "model.norm",
        ),
    )

    vocab_parameters = ("model.embed_tokens.weight", "lm_head.weight")

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """nanotron's RandomInit: N(0, std), projections back into the residual stream damped by depth."""
        layers = self.config.num_hidden_layers
        into_residual = std / math.sqrt(2 * layers) if scaling == "NUM_LAYERS" else std
        return [
            InitRule("*norm.weight", Constant(1.0)),
            InitRule("*.bias", Constant(0.0)),
            InitRule("*.o_proj.weight", Normal(into_residual)),
            InitRule("*.down_proj.weight", Normal(into_residual)),
            InitRule("*.weight", Normal(std)),
        ]
