"""Convert between the two orders of a head's channels that RoPE implementations use.

RoPE rotates pairs of channels. In Hugging Face's Llama pair i is (i, i + head_dim / 2), in the interleaved form
(Meta's, nanotron's `rope_interleaved`) it is (2 i, 2 i + 1). Scores are sums over channels, so permuting the
rows of q_proj and k_proj, and the weights of their norms, alike turns a model of one form into the same model of the
other:

    interleaved   a0 b0 a1 b1 a2 b2
    halves        a0 a1 a2 b0 b1 b2
"""

import torch
from torch import Tensor


def is_rotated(name: str) -> bool:
    """Return whether the rows of this parameter are in the order of RoPE's pairs."""
    return any(
        name.endswith(f".{which}_{module}") for which in "qk" for module in ("proj.weight", "proj.bias", "norm.weight")
    )


def to_halves(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder ``[heads * head_dim, …]`` from interleaved to halves; only a head's first `rotary_dim` channels move."""
    return _reordered(rows, head_dim, (rotary_dim // 2, 2))


def to_interleaved(rows: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorder ``[heads * head_dim, …]`` from halves to interleaved, the inverse of `to_halves`."""
    return _reordered(rows, head_dim, (2, rotary_dim // 2))


def _reordered(rows: Tensor, head_dim: int, pairs: tuple[int, int]) -> Tensor:
    """Transpose the first channels of every head as a matrix of shape `pairs`; the others stay in place."""
    turning, still = rows.unflatten(0, (-1, head_dim)).tensor_split([pairs[0] * pairs[1]], dim=1)
    return torch.cat((turning.unflatten(1, pairs).transpose(1, 2).flatten(1, 2), still), dim=1).flatten(0, 1)
