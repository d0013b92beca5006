"""Counter-based random tensors: a rank fills only its own shard, with the same bits on every device.

Element i of a stream is a function of (key, i), independent of ranks and of the order of calls:

    key = derive_key(42, "model.norm.weight")
    fill_normal_(TensorShard(torch.empty(8), (8,), (0,)), key)                        # numbers 0 to 7
    fill_normal_(TensorShard(torch.empty(4, device="cuda"), (8,), (4,)), key)         # numbers 4 to 7 of the same

Everything is int64 arithmetic (which wraps), a table lookup and float64 +, x, so nothing depends on a
device's maths library (see `kernels.hashing` and `kernels.quantiles`, the same in numpy). The float64 product
and sum are two separate operations on purpose: a fused multiply-add would round once instead of twice.
Torch's generators are never touched.

Work is done in chunks, in buffers that fit a CPU core's cache.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kenotron.kernels import quantiles
from kenotron.kernels.hashing import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2
from kenotron.kernels.tensor_shard import TensorShard

CPU_CHUNK = 1 << 14  # elements: half a dozen buffers of 128 KiB; 100 million normals take 1.5 s on one core
DEVICE_CHUNK = 1 << 22


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _xor_shift_(z: Tensor, bits: int) -> Tensor:
    """Compute ``z ^= z >>> bits`` in place; torch's shift copies the sign bit, and the mask removes the copies."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def hash_counters(key: int, counters: Tensor) -> Tensor:
    """Return `hashing.hash64` of every int64 counter, as int64 of the same shape with the same 64 bits."""
    z = counters * _signed(GOLDEN)
    z.add_(_signed(key))
    _xor_shift_(z, 30).mul_(_signed(MULTIPLIER_1)).add_(_signed(key))
    _xor_shift_(z, 27).mul_(_signed(MULTIPLIER_2))
    return _xor_shift_(z, 31)


def uniform_at(key: int, counters: Tensor) -> Tensor:
    """Return float64 in [0, 1) with 53 random bits, one for each counter."""
    bits = (hash_counters(key, counters) >> 11).bitwise_and_((1 << 53) - 1)
    return bits.to(torch.float64).mul_(2.0**-53)


@lru_cache(maxsize=16)
def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    intercepts, slopes = quantiles.table()
    return torch.tensor(intercepts, device=device), torch.tensor(slopes, device=device)


def normal_at(key: int, counters: Tensor) -> Tensor:
    """Return a standard normal in float64 for each counter, by the table of `quantiles`."""
    intercepts, slopes = _table(counters.device)
    bits = hash_counters(key, counters)
    u = (bits & ((1 << 52) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-53)
    rows = (u.view(torch.int64) >> quantiles.DROPPED_BITS).sub_(quantiles.FIRST_ROW)
    z = slopes.take(rows).mul_(u)  # slopes[rows] of one number is a view
    z.add_(intercepts[rows])
    sign = bits.bitwise_and_(_signed(1 << 63))
    z.view(torch.int64).bitwise_xor_(sign)
    return z


def fill_normal_(shard: TensorShard, key: int, std: float = 1.0) -> None:
    """Fill a shard with normals of mean 0: element i of the whole tensor is number i of the stream, in any shard.

    Computed in float64, rounded once to float32 and from there to the tensor's dtype.
    """
    tensor = shard.tensor.detach()
    for part in shard.parts(CPU_CHUNK if tensor.device.type == "cpu" else DEVICE_CHUNK):
        tensor[part] = normal_at(key, shard.numbers(part, tensor.device)).mul_(std).to(torch.float32)
