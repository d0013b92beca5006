"""Rules that give a parameter's fresh weights a distribution by its name; the first rule that matches applies.

[InitRule("*norm.weight", Constant(1.0)), InitRule("*.weight", Normal(0.02))]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError

if TYPE_CHECKING:
    from kenotron.kernels.tensor_shard import TensorShard


@dataclass(frozen=True)
class Normal:
    """N(0, std)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True)
class FilledBy:
    """A family's own function ``fill(shard, key)``; an element must get the same bits in any shard."""

    fill: Callable[[TensorShard, int], None]


@dataclass(frozen=True)
class InitRule:
    """The distribution of parameters whose names match `pattern`, shell-style (``*`` crosses dots)."""

    pattern: str
    distribution: Normal | Constant | FilledBy


def times(distribution: Normal | Constant | FilledBy, factor: float) -> Normal | Constant | FilledBy:
    """Return `distribution` with its standard deviation multiplied by `factor`."""
    return Normal(distribution.std * factor) if isinstance(distribution, Normal) else distribution


def rule_for(name: str, rules: Sequence[InitRule]) -> Normal | Constant | FilledBy:
    """Return the distribution of parameter `name`. Raises InputError if no rule covers it."""
    for rule in rules:
        if fnmatchcase(name, rule.pattern):
            return rule.distribution
    raise InputError(f"init_rules: no rule of the family covers the parameter {name!r}: add an InitRule")
