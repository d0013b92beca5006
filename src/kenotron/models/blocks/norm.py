"""Norms over the last dimension.

RMSNorm divides by the root mean square, then scales (Zhang & Sennrich 2019, arXiv 1910.07467): x = [3, 4] has mean
square 12.5, so the output is [3, 4] / sqrt(12.5 + eps) * weight = [0.85, 1.13] * weight. LayerNorm subtracts the mean
first and has a bias (Ba et al. 2016, arXiv 1607.06450): [3, 4] becomes [-1, 1] * weight + bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """RMSNorm of x ``[tokens, hidden]``, with statistics in fp32 for any dtype of x."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x; the statistics are computed in fp32, the rest in x's dtype."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class HeadRMSNorm(RMSNorm):
    """RMSNorm of each head of x ``[tokens, heads * head_dim]`` separately, with one weight for all heads."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the heads that this rank holds; their number is read off x."""
        return super().forward(x.unflatten(-1, (-1, self.weight.shape[0]))).flatten(-2)


class PlainRMSNorm(nn.Module):
    """RMSNorm without a weight, of every `width` adjacent features of x ``[tokens, features]`` separately.

    If `width` is head_dim, it normalizes any number of heads that a rank holds.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x; the statistics are computed in fp32, the rest in x's dtype."""
        return rms_norm(x.unflatten(-1, (-1, self.width)), x.new_ones(self.width), self.eps).flatten(-2)


class GroupRMSNorm(RMSNorm):
    """RMSNorm of each group of adjacent features of x ``[tokens, features]`` separately."""

    def __init__(self, features: int, groups: int, eps: float) -> None:
        super().__init__(features, eps)
        self.groups, self.group_size = groups, features // groups

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the groups that this rank holds, read off x; statistics are in fp32."""
        wide = x.float().unflatten(-1, (-1, self.group_size))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.flatten(-2).to(x.dtype) * self.weight.to(x.dtype)


class LayerNorm(nn.Module):
    """LayerNorm of x ``[tokens, hidden]``."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x in its dtype; torch computes the statistics in fp32."""
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
