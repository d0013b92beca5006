"""Rotary positions in one launch; formulas and reference in `kernels.rope`.

A program rotates all heads of a token, which share its angles. Backward is the same kernel with the opposite angle.
The result is laid out token by token, as varlen attention reads it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kenotron.kernels.rope import Rotation
from kenotron.kernels.shortcuts import unit_stride


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Compute `kernels.rope.apply_rope` for x ``[sequences, length, heads, head_dim]`` and fp32 tables."""
    return Rotation.apply(x, cos, sin, interleaved, _turned)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> Tensor:
    sequences, length, heads, head_dim = x.shape
    half = cos.shape[-1]
    flat = unit_stride(x.reshape(-1, heads, head_dim))
    cos, sin = (table.expand(sequences, length, half).reshape(-1, half).contiguous() for table in (cos, sin))
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if 2 * half < head_dim:
        out[..., 2 * half :] = flat[..., 2 * half :]
    kernel[(len(flat),)](
        *(flat, cos, sin, out, sign, heads, head_dim, half, flat.stride(0), flat.stride(1)),
        INTERLEAVED=interleaved,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(half),
    )
    return out.view(x.shape)


@triton.jit
def kernel(
    x, cos, sin, out, sign, heads, head_dim, half, x_token, x_head,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (pair < half)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0)
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0) * sign
    here = x + token * x_token + head * x_head
    a = tl.load(here + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(here + second, mask=inside, other=0.0).to(tl.float32)
    there = out + (token * heads + head) * head_dim
    tl.store(there + first, a * c - b * s, mask=inside)
    tl.store(there + second, b * c + a * s, mask=inside)
