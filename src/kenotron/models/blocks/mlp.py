"""Gated MLP: ``down(act(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202; SwiGLU when act is SiLU)."""

from __future__ import annotations

from torch import Tensor, nn

from kenotron.kernels.swiglu import swiglu
from kenotron.models.blocks.linear import Linear


class GatedMLP(nn.Module):
    """x ``[tokens, hidden]`` → the same shape."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x ``[tokens, hidden]``."""
        gate, up = self.gate_proj.grouped(x, self.gate_proj, self.up_proj)
        return self.down_proj(swiglu(gate, up, self.activation))
