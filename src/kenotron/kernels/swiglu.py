"""The gate of a gated MLP: ``act(gate) * up`` (Shazeer 2020, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def swiglu(gate: Tensor, up: Tensor, act: str = "silu") -> Tensor:
    """gate and up of one shape → ``act(gate) * up``."""
    return ACTIVATIONS[act](gate) * up
