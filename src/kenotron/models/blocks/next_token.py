"""The block that learns to predict a further token (multi-token prediction; DeepSeek-V3, arXiv 2412.19437, 2.2).

    tokens        t1  t2  t3  t4          h  ─── norm ──┐
    next tokens   t2  t3  t4  -           t2 … ─ embed ─ norm ─ (join) ─ projection ─ block ─ norm ── the model's head
    its labels    t3  t4  -   -

A second such block reads the first one's output, with tokens and labels shifted by one more. Embedding and head are
shared with the model. Generation does not use these blocks.
"""

import torch
from torch import Tensor, nn

from kenotron.models.blocks.linear import Linear
from kenotron.models.blocks.moe import MoEBlock
from kenotron.models.context import Context


class NextTokenBlock(MoEBlock):
    """Maps ``[tokens, 2 hidden]``, next tokens' embeddings and hidden states, to hidden states ``[tokens, hidden]``.

    Names are those of DeepSeek's files. `vocab_size` is the head's, to count its FLOPs.
    """

    def __init__(self, block: MoEBlock, norms: tuple[nn.Module, nn.Module, nn.Module], hidden: int, vocab_size: int):
        super().__init__(block.input_layernorm, block.self_attn, block.post_attention_layernorm, block.mlp)
        self.enorm, self.hnorm, last = norms
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = nn.ModuleDict({"norm": last})
        self.vocab_size = vocab_size

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """Return the next hidden states; rope is (cos, sin), each ``[sequences, length, head_dim / 2]``."""
        embedded, hidden = x.chunk(2, dim=-1)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.shared_head["norm"](super().forward(x, rope, ctx)).to(x.dtype)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of the head in one token's forward pass; submodules count themselves."""
        return float(self.vocab_size * self.eh_proj.weight.shape[1])
