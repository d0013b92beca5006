"""A part of a model: the consecutive layers that one pipeline stage holds, built by itself.

    ModelPart((0, 1), first=True, last=False)      embedding, layers 0 and 1
    ModelPart((2, 3), first=False, last=True)      layers 2 and 3, final norm, head

Layers keep their global numbers, so a parameter has one name wherever it lives. A part that is neither first nor
last reads hidden states and returns hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelPart:
    """`layers`: global numbers, consecutive. `first` has the embedding, `last` the final norm and the head."""

    layers: tuple[int, ...]
    first: bool = True
    last: bool = True

    @staticmethod
    def whole(layers: int) -> ModelPart:
        """Everything of a model with this many layers."""
        return ModelPart(tuple(range(layers)))
