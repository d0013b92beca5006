"""Counter-based random tensors: any rank fills just its own shard, with the same bits on every device.

Element i of a stream is a function of (key, i), never of who asks or in what order:

    key = derive_key(42, "model.norm.weight")
    fill_normal_(torch.empty(8), key)[4:]  ==  fill_normal_(torch.empty(4, device="cuda"), key, 4)

Everything is int64 arithmetic (which wraps), a table look-up and float64 +, x, so nothing depends on a
device's maths library (see `kernels.hashing` and `kernels.quantiles`, the same in numpy). The float64 product
and sum are two separate operations on purpose: a fused multiply-add would round once instead of twice.
Torch's generators are never touched.

Work goes chunk by chunk through buffers that fit a CPU core's cache.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from kenotron.kernels import quantiles
from kenotron.kernels.hashing import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2

CPU_CHUNK = 1 << 14  # elements: half a dozen buffers of 128 KiB; 100 million normals take 1.5 s on one core
DEVICE_CHUNK = 1 << 22


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    """``z ^= z >>> bits`` in place; torch's shift copies the sign, the mask takes the copies away."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def hash_counters(key: int, counters: Tensor) -> Tensor:
    """`hashing.hash64` of every int64 counter: int64 of the same shape, with the same 64 bits."""
    z = counters * _signed(GOLDEN)
    z.add_(_signed(key))
    _xor_shift_(z, 30).mul_(_signed(MULTIPLIER_1)).add_(_signed(key))
    _xor_shift_(z, 27).mul_(_signed(MULTIPLIER_2))
    return _xor_shift_(z, 31)


def uniform_at(key: int, counters: Tensor) -> Tensor:
    """Floats in [0, 1), one for each counter: float64 with 53 random bits."""
    bits = (hash_counters(key, counters) >> 11).bitwise_and_((1 << 53) - 1)
    return bits.to(torch.float64).mul_(2.0**-53)


@lru_cache(maxsize=16)
def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    intercepts, slopes = quantiles.table()
    return torch.tensor(intercepts, device=device), torch.tensor(slopes, device=device)


def normal_at(key: int, counters: Tensor) -> Tensor:
    """A standard normal for each counter: float64, by the table of `quantiles`."""
    intercepts, slopes = _table(counters.device)
    bits = hash_counters(key, counters)
    u = (bits & ((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-53)
    rows = (u.view(torch.int64) >> quantiles.DROPPED_BITS).sub_(quantiles.FIRST_ROW)
    z = slopes[rows].mul_(u)
    z.add_(intercepts[rows])
    sign = bits.bitwise_and_(_signed(1 << 63))
    z.view(torch.int64).bitwise_xor_(sign)
    return z


def fill_normal_(out: Tensor, key: int, start: int = 0, std: float = 1.0) -> Tensor:
    """Fills a contiguous tensor, element i in memory order with number ``start + i``: normal, of mean 0.

    Computed in float64, rounded once to float32 and from there to `out`'s dtype.
    """
    if not out.is_contiguous():
        raise ValueError(f"expected a contiguous tensor, got strides {out.stride()} for shape {tuple(out.shape)}")
    flat = out.detach().view(-1)
    chunk = _chunk(out.device)
    counters = torch.arange(start, start + min(chunk, flat.numel()), dtype=torch.int64, device=out.device)
    for begin in range(0, flat.numel(), chunk):
        piece = flat[begin : begin + chunk]
        piece.copy_(normal_at(key, counters[: piece.numel()]).mul_(std).to(torch.float32))
        counters.add_(chunk)
    return out


def fill_normal_shard_(
    shard: Tensor, key: int, shape: Sequence[int], offset: Sequence[int], std: float = 1.0
) -> Tensor:
    """Fills the part of a logical tensor of `shape` that begins at `offset`, with the bits of the whole.

    For ``shape = [4, 6]``, a shard ``[4, 3]`` at offset ``[0, 3]`` holds elements 3, 4, 5, 9, 10, 11, 15, ...
    """
    if not len(shape) == len(offset) == shard.dim():
        raise ValueError(f"shard {tuple(shard.shape)}, shape {tuple(shape)}, offset {tuple(offset)}: ranks differ")
    if any(o + s > n or o < 0 for o, s, n in zip(offset, shard.shape, shape)):
        raise ValueError(f"shard {tuple(shard.shape)} at {tuple(offset)} leaves the tensor {tuple(shape)}")
    _fill_block_(shard.detach(), key, list(shape), list(offset), 0, std)
    return shard


def _fill_block_(block: Tensor, key: int, shape: list[int], offset: list[int], start: int, std: float) -> None:
    """`fill_normal_shard_` inside a tensor whose first element is number `start` of the stream."""
    stride = prod(shape[1:])
    if list(block.shape[1:]) == shape[1:]:  # whole rows: one run of counters
        begin = start + (offset[0] * stride if offset else 0)
        fill_normal_(block, key, begin, std)
    elif block.dim() == 2:
        _fill_columns_(block, key, shape[1], offset, start, std)
    else:
        for i in range(block.shape[0]):
            _fill_block_(block[i], key, shape[1:], offset[1:], start + (offset[0] + i) * stride, std)


def _fill_columns_(block: Tensor, key: int, width: int, offset: list[int], start: int, std: float) -> None:
    """Some columns of some rows of a matrix of `width` columns, a few rows at a time."""
    rows, columns = (
        torch.arange(o, o + n, dtype=torch.int64, device=block.device) for o, n in zip(offset, block.shape)
    )
    rows_at_once = max(1, _chunk(block.device) // max(1, block.shape[1]))
    for begin in range(0, block.shape[0], rows_at_once):
        piece = slice(begin, begin + rows_at_once)
        counters = rows[piece, None] * width + columns + start
        block[piece] = normal_at(key, counters).mul_(std).to(torch.float32)


def _chunk(device: torch.device) -> int:
    return CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
