"""Patterns of module names that say how a family's models may be split; `kenotron.parallel` reads them.

`*` matches one name between dots, so ``model.layers.*.mlp.up_proj`` is every layer's up projection:

    >>> matching("model.layers.*.mlp", ["model.layers.0.mlp", "model.layers.11.mlp", "model.norm"])
    ['model.layers.0.mlp', 'model.layers.11.mlp']
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError, nearest

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Plan:
    """Each field holds patterns of module names.

    `column`, `row`: linears split by output or input features; `column` may also name an RMSNorm over all features of
    such an output, or an embedding added to it. `kv`: modules of `column` or `channels` for key-value heads, which may
    be fewer than the ranks. `vocab`: embedding and head, split by vocabulary rows. `sequence`: modules that work on
    sequence shards under sequence parallelism. `inner_row`: row-split linears inside a block, whose complete sum every
    rank needs to continue with its own features. `channels`: modules that compute feature by feature (a depthwise
    convolution, a recurrence); all their parameters have a row per feature. `per_head`: modules with one weight for all
    heads, such as a norm of queries; a rank applies it to its own heads, so gradients are summed over ranks. `experts`:
    mixtures of experts, in which each expert is split. `blocks`: the unit of recomputation, compilation, FSDP wrapping
    and pipeline stages.
    """

    blocks: str
    column: tuple[str, ...] = ()
    kv: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    inner_row: tuple[str, ...] = ()
    channels: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def check(self, model: nn.Module) -> None:
        """Raise InputError if a pattern matches no module of the complete `model`: its weights would be replicated.

        Raise it also if a pattern of `kv` matches modules that neither `column` nor `channels` splits.
        """
        names = [name for name, _ in model.named_modules()]
        fields = {name: (self.blocks,) if name == "blocks" else getattr(self, name) for name in vars(self)}
        for field, patterns in fields.items():
            for pattern in patterns:
                if not matching(pattern, names):
                    near = nearest(pattern, {re.sub(r"\.\d+", ".*", name) for name in names})
                    raise InputError(f"plan.{field}: {pattern!r} matches no module of {type(model).__name__}{near}")
        split = {name for pattern in (*self.column, *self.channels) for name in matching(pattern, names)}
        for pattern in self.kv:
            if rest := set(matching(pattern, names)) - split:
                raise InputError(f"plan.kv: {pattern!r} names {min(rest)}, which plan.column does not split")


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that `pattern` matches, in their order."""
    regex = re.compile("".join(r"[^.]+" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern)))
    return [name for name in names if regex.fullmatch(name)]


def modules(model: nn.Module, *patterns: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every module that one of `patterns` matches, pattern by pattern."""
    named = dict(model.named_modules())
    return [(name, named[name]) for pattern in patterns for name in matching(pattern, named)]
