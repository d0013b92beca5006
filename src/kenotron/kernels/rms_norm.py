"""RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467): ``x / sqrt(mean(x**2) + eps) * weight``."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x ``[..., hidden]``, weight ``[hidden]`` → x's shape and dtype; statistics in fp32."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
