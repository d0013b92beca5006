"""Two orders of one head's channels, and the way between them.

RoPE turns pairs of channels. In Hugging Face's Llama pair i is (i, i + head_dim / 2), in the interleaved form
(Meta's, nanotron's `rope_interleaved`) it is (2 i, 2 i + 1). Scores are sums over channels, so permuting the
rows of q_proj and k_proj, and the weights of their norms, alike turns a model of one form into the same model of the
other:

    interleaved   a0 b0 a1 b1 a2 b2
    halves        a0 a1 a2 b0 b1 b2
"""

from __future__ import annotations

from torch import Tensor


def is_rotated(name: str) -> bool:
    """Do the rows of this parameter stand in the order of RoPE's pairs?"""
    return any(
        name.endswith(f".{which}_{module}") for which in "qk" for module in ("proj.weight", "proj.bias", "norm.weight")
    )


def to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """``[heads * head_dim, …]`` from the interleaved order."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def to_interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """``[heads * head_dim, …]`` from the order in halves."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
