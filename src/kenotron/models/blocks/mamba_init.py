"""Mamba's initial weights (Gu & Dao 2023, arXiv 2312.00752, sections 3.6 and E; state-spaces/mamba).

    A_log               log(1), log(2), log(3), …      the real part of S4D's spectrum
    bias of dt          softplus^-1 of a time step, log-uniform in [0.001, 0.1]
    weights             uniform in ± 1 / sqrt(inputs)

Each is a function of (key, element), so that a rank fills only its own shard, with the same bits as in the whole
tensor. Logarithms are computed on the CPU in float64 on every device.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kenotron.kernels.random import uniform_at
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models.init_rules import FilledBy

ELEMENTS = 1 << 20  # filled at a time: 8 MiB of counters


def uniform(bound: float) -> FilledBy:
    """Return the uniform distribution in ± bound."""
    return FilledBy(partial(_fill, lambda u: (2 * u - 1) * bound))


def time_step_bias(low: float, high: float, floor: float) -> FilledBy:
    """Return the distribution whose softplus is log-uniform in [low, high], and at least `floor`."""

    def bias(u: Tensor) -> Tensor:
        dt = (u * (math.log(high) - math.log(low)) + math.log(low)).exp().clamp(min=floor)
        return dt + (-torch.expm1(-dt)).log()

    return FilledBy(partial(_fill, bias))


def log_of_index() -> FilledBy:
    """Return the fill with log(1), log(2), … along the last dimension."""

    def fill(shard: TensorShard, key: int) -> None:
        first = shard.offset[-1] + 1
        shard.tensor.copy_(torch.arange(first, first + shard.tensor.shape[-1], dtype=torch.float64).log())

    return FilledBy(fill)


def _fill(of_uniform: Callable[[Tensor], Tensor], shard: TensorShard, key: int) -> None:
    for part in shard.parts(ELEMENTS):
        shard.tensor[part] = of_uniform(uniform_at(key, shard.numbers(part, "cpu"))).to(shard.tensor.device)
