"""Fresh weights as functions of (seed, name, element): any rank fills just its own shard, with the same bits.

Element [row, column] of a matrix is number ``row * columns + column`` of the stream named after the
parameter, so a shard with rows 4–7 holds exactly what rows 4–7 of the whole matrix would. Padding the
vocabulary adds rows at the end and moves nothing.

Which distribution a parameter gets is a list of rules, first match wins:

    [InitRule("*norm.weight", Constant(1.0)), InitRule("*.weight", Normal(0.02))]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from kenotron.kernels.hashing import derive_key
from kenotron.kernels.random import fill_normal_shard_


@dataclass(frozen=True)
class Normal:
    std: float


@dataclass(frozen=True)
class Constant:
    value: float


@dataclass(frozen=True)
class InitRule:
    """`pattern` is a shell-style pattern of parameter names (``*`` crosses dots)."""

    pattern: str
    distribution: Normal | Constant


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank holds: `tensor` is the block at `offset` of a `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def whole(parameter: Tensor) -> Shard:
    """The shard of a rank that holds everything."""
    return Shard(parameter, tuple(parameter.shape), (0,) * parameter.dim())


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[str, nn.Parameter]],
    rules: Sequence[InitRule],
    seed: int,
    shard_of: Callable[[Tensor], Shard] = whole,
) -> None:
    """Fill `parameters` in place. `shard_of` tells which block of the logical tensor a parameter holds here."""
    for name, parameter in parameters:
        fill(name, shard_of(parameter), rule_for(name, rules), seed)


def rule_for(name: str, rules: Sequence[InitRule]) -> Normal | Constant:
    for rule in rules:
        if fnmatchcase(name, rule.pattern):
            return rule.distribution
    raise ValueError(f"no initialisation rule covers parameter {name!r}")


def fill(name: str, shard: Shard, distribution: Normal | Constant, seed: int) -> None:
    """Fill one shard with the bits that the whole parameter would have there."""
    if isinstance(distribution, Constant):
        shard.tensor.fill_(distribution.value)
    else:
        key = derive_key("init", seed, name)
        fill_normal_shard_(shard.tensor, key, shard.shape, shard.offset, distribution.std)


def zero_padding_rows(parameter: Tensor, real_rows: int, shard_of: Callable[[Tensor], Shard] = whole) -> None:
    """Rows beyond the vocabulary exist in memory only; zeros keep them out of norms and statistics."""
    shard = shard_of(parameter)
    first = max(real_rows - shard.offset[0], 0)
    with torch.no_grad():
        shard.tensor[first:].zero_()
