"""Apply rotary position embedding (Su et al. 2021, arXiv 2104.09864), which rotates each pair of channels.

    (a, b) → (a cos - b sin, b cos + a sin)

For head_dim 4, channels (x0, x1, x2, x3) pair as (x0, x2), (x1, x3) by halves, as Hugging Face and Llama's converted
weights have it, or as (x0, x1), (x2, x3) when interleaved. A quarter turn (cos 0, sin 1) of both pairs
gives (-x2, -x3, x0, x1), or (-x1, x0, -x3, x2).

The backward is the same rotation by the opposite angle, so only the tables are saved. It is computed in
fp32. At ``[8, 256, 6, 64]`` on CPU, forward and backward: 3.3 ms → 1.6 in fp32, 2.3 → 1.8 in bf16.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kenotron.kernels.fused import fused
from kenotron.kernels.shortcuts import is_small

BLOCK = 1 << 17  # elements that a thread processes at a time on CPU: 512 KiB in fp32


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x ``[sequences, length, heads, head_dim]`` by cos, sin ``[sequences, length, head_dim / 2]`` fp32.

    Tables for fewer channels rotate the first ones of every head; the others stay unchanged (GPT-NeoX's rotary_pct).
    The result has x's shape, but is laid out ``[sequences, heads, length, head_dim]`` in memory, as attention reads it.
    """
    if kernel := fused("rope.apply_rope", x):
        return kernel(x, cos, sin, interleaved)
    if torch.compiler.is_compiling() or is_small(x):
        return _plain(x, cos, sin, interleaved)
    return Rotation.apply(x, cos, sin, interleaved, _turned)


def apply_rope_to_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Apply RoPE to queries and keys, whose numbers of heads may differ; few tokens are rotated as one tensor."""
    if is_small(q) and not torch.compiler.is_compiling():  # decoding: calls cost more than computation
        both = apply_rope(torch.cat((q, k), dim=2), cos, sin, interleaved)
        return both[:, :, : q.shape[2]], both[:, :, q.shape[2] :]
    return apply_rope(q, cos, sin, interleaved), apply_rope(k, cos, sin, interleaved)


def _plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turning = 2 * cos.shape[-1]
    if turning < x.shape[-1]:
        return torch.cat((_plain(x[..., :turning], cos, sin, interleaved), x[..., turning:]), dim=-1)
    a, b = _pairs(x.to(torch.promote_types(x.dtype, torch.float32)), interleaved)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return out.to(x.dtype)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second channel of every pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    a, b = x.chunk(2, dim=-1)
    return a, b


class Rotation(torch.autograd.Function):
    """Computes ``turned(x, cos, sin, sign, interleaved)``, and in backward the same with the opposite sign."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, turned: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.turned = interleaved, turned
        return turned(x, cos, sin, 1.0, interleaved)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return ctx.turned(upstream[0], *ctx.saved_tensors, -1.0, ctx.interleaved), None, None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> Tensor:
    """Rotate x; the result is laid out as attention reads it, in backward as the projection that x came from."""
    out = x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) if sign > 0 else x.new_empty(x.shape)
    return _rotate(x, cos, sin, sign, interleaved, out)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool, out: Tensor) -> Tensor:
    """Write x, rotated by ``sign * angle``, to `out` of any strides; if fp32 copies are needed, in chunks."""
    turning = 2 * cos.shape[-1]
    if turning < x.shape[-1]:
        out[..., turning:] = x[..., turning:]
        _rotate(x[..., :turning], cos, sin, sign, interleaved, out[..., :turning])
        return out
    sequences, length, heads, head_dim = x.shape
    cos, sin = (table.expand(sequences, length, -1) for table in (cos, sin))
    if x.device.type != "cpu" or x.dtype == torch.float32:
        _turn(x, cos, sin, out, sign, interleaved)
        return out
    tokens = max(1, BLOCK * torch.get_num_threads() // (heads * head_dim))
    for some in zip(*(tensor.split(max(1, tokens // length)) for tensor in (x, cos, sin, out))):
        for a, b, c, d in zip(*(tensor.split(tokens, dim=1) for tensor in some)):
            _turn(a, b, c, d, sign, interleaved)
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: float, interleaved: bool) -> None:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, cos, sin = x.to(dtype), cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = out if out.dtype == dtype else torch.empty_like(wide)
    (a, b), (turned_a, turned_b) = _pairs(wide, interleaved), _pairs(turned, interleaved)
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin, value=sign)
    if turned is not out:
        out.copy_(turned)
