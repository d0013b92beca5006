"""Norms, over the last dimension.

RMSNorm divides by the root mean square, then scales (Zhang & Sennrich 2019, arXiv 1910.07467): x = [3, 4] has mean
square 12.5, so the output is [3, 4] / sqrt(12.5 + eps) * weight = [0.85, 1.13] * weight. LayerNorm subtracts the mean
first and has a bias (Ba et al. 2016, arXiv 1607.06450): [3, 4] becomes [-1, 1] * weight + bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x ``[tokens, hidden]`` → the same shape; statistics in fp32 whatever x's dtype."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Computed in x's dtype but for the statistics."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class HeadRMSNorm(RMSNorm):
    """RMSNorm of every head by itself: x ``[tokens, heads * head_dim]`` → the same shape; one weight for all heads."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the heads that this rank holds: their number is x's."""
        return super().forward(x.unflatten(-1, (-1, self.weight.shape[0]))).flatten(-2)


class PlainRMSNorm(nn.Module):
    """RMSNorm without a weight, of every `width` neighbouring features separately: x ``[tokens, features]`` → the same.

    With the width of a head it works on the heads that a rank holds, however many.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        """Computed in x's dtype but for the statistics."""
        return rms_norm(x.unflatten(-1, (-1, self.width)), x.new_ones(self.width), self.eps).flatten(-2)


class GroupRMSNorm(RMSNorm):
    """RMSNorm of every group of neighbouring features by itself: x ``[tokens, features]`` → the same shape."""

    def __init__(self, features: int, groups: int, eps: float) -> None:
        super().__init__(features, eps)
        self.groups, self.group_size = groups, features // groups

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the groups that this rank holds: their number is x's. Statistics in fp32."""
        wide = x.float().unflatten(-1, (-1, self.group_size))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.flatten(-2).to(x.dtype) * self.weight.to(x.dtype)


class LayerNorm(nn.Module):
    """x ``[tokens, hidden]`` → the same shape."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Computed in x's dtype; torch keeps the statistics in fp32."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
