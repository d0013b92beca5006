"""The block that learns to predict one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2), and what it reads.

    tokens        t1  t2  t3  t4          h  ─── norm ──┐
    next ones     t2  t3  t4  -           t2 … ─ embed ─ norm ─ (join) ─ projection ─ block ─ norm ── the model's head
    its labels    t3  t4  -   -

A second such block reads what the first one gives, and tokens and labels of one place further. Embedding and head are
the model's. Generation does without them.
"""

import torch
from torch import Tensor, nn

from kenotron.models.blocks.linear import Linear
from kenotron.models.blocks.moe import MoEBlock
from kenotron.models.context import Context


class NextTokenBlock(MoEBlock):
    """``[tokens, 2 hidden]``, embeddings of the next tokens beside hidden states → hidden states ``[tokens, hidden]``.

    Names are those of DeepSeek's files. `vocab_size`: of the head that reads the result, to count its FLOPs.
    """

    def __init__(self, block: MoEBlock, norms: tuple[nn.Module, nn.Module, nn.Module], hidden: int, vocab_size: int):
        super().__init__(block.input_layernorm, block.self_attn, block.post_attention_layernorm, block.mlp)
        self.enorm, self.hnorm, last = norms
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = nn.ModuleDict({"norm": last})
        self.vocab_size = vocab_size

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """rope (cos, sin), each ``[sequences, length, head_dim / 2]``."""
        embedded, hidden = x.chunk(2, dim=-1)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.shared_head["norm"](super().forward(x, rope, ctx)).to(x.dtype)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of the head in one token's forward pass; the modules inside count themselves."""
        return float(self.vocab_size * self.eh_proj.weight.shape[1])
