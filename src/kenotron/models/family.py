"""What every model family answers, so that the rest of the house need not know which one it holds."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from kenotron.models.initialization import InitRule
from kenotron.models.part import Part
from kenotron.models.plan import Plan


class LanguageModel(nn.Module):
    """A family: ``model(tokens, ctx)`` → logits; ``model(tokens, ctx, labels)`` → (loss, its z part)."""

    plan: ClassVar[Plan]
    """How it may be split."""
    vocab_parameters: ClassVar[tuple[str, ...]]
    """Parameters with a row for every token: padded in memory, saved without the padding."""
    config: Any
    """The architecture section it was built from."""
    part: Part
    """Which of its layers are here: all, or those of a pipeline stage."""

    @abstractmethod
    def tie_weights(self) -> None:
        """Share what the config ties; called again whenever parameters were replaced."""

    @abstractmethod
    def ties(self) -> dict[str, str]:
        """Names that stand for one weight, and the name that owns it; the same in every part of a model."""

    @abstractmethod
    def tied_copies(self) -> dict[str, str]:
        """Parameters here that only mirror one of another part, and that one's name."""

    @abstractmethod
    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Distributions of fresh weights, first match wins."""

    @abstractmethod
    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """What flows from the embedding on; every product runs in it, weights stay fp32."""

    @abstractmethod
    def set_recompute(self, recompute: bool) -> None:
        """Whether blocks forget their activations and compute them again in backward."""
