"""Feed-forward layers: gated, ``down(act(gate(x)) * up(x))``, and plain, ``down(act(up(x)))``.

Gated: Shazeer 2020, arXiv 2002.05202; SwiGLU when act is SiLU. Plain: Vaswani et al. 2017, arXiv 1706.03762.
"""

from torch import Tensor, nn

from kenotron.kernels.swiglu import activate, swiglu
from kenotron.models.blocks.linear import Linear


class GatedMLP(nn.Module):
    """A gated feed-forward of x ``[tokens, hidden]``, with a result of the same shape."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x ``[tokens, hidden]``, of the same shape."""
        gate, up = self.gate_proj.grouped(x, self.gate_proj, self.up_proj)
        return self.down_proj(swiglu(gate, up, self.activation))


class MLP(nn.Module):
    """A plain feed-forward of x ``[tokens, hidden]``, with a result of the same shape."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = True) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x ``[tokens, hidden]``, of the same shape."""
        return self.down_proj(activate(self.up_proj(x), self.activation))
