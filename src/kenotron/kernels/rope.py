"""Rotary position embedding applied (Su et al. 2021, arXiv 2104.09864): channel pairs turned by an angle."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x ``[sequences, length, heads, head_dim]``; cos, sin ``[sequences, length, head_dim / 2]`` → x's shape.

    Pairs are channels (i, i + head_dim / 2), or (2 i, 2 i + 1) when `interleaved`.
    """
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
