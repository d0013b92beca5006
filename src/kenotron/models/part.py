"""A part of a model: the consecutive layers of one pipeline stage, built without the others.

    ModelPart((0, 1), first=True, last=False)      embedding, layers 0 and 1
    ModelPart((2, 3), first=False, last=True)      layers 2 and 3, final norm, head

Layers keep their global numbers, so a parameter has the same name on every layout. A part that is neither first nor
last reads hidden states and returns hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelPart:
    """Consecutive `layers` by global number. The `first` part has the embedding, the `last` the final norm and head."""

    layers: tuple[int, ...]
    first: bool = True
    last: bool = True

    @staticmethod
    def whole(layers: int) -> ModelPart:
        """Return the part that is a whole model with this many layers."""
        return ModelPart(tuple(range(layers)))
