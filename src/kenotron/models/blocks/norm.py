"""RMSNorm: divide by the root mean square, then scale (Zhang & Sennrich 2019, arXiv 1910.07467).

x = [3, 4] has mean square 12.5, so the output is [3, 4] / sqrt(12.5 + eps) * weight = [0.85, 1.13] * weight.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kenotron.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x ``[tokens, hidden]`` → the same shape; statistics in fp32 whatever x's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        return 0.0  # by the field's convention only matrix products count
