"""Train with your own loss: `model.loss` names a function of logits and labels. (`headless` has its own module.)

    def label_smoothing(logits, labels):                # logits [tokens, vocab] fp32, labels [tokens], -100: no loss
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)             # [tokens]

It returns one loss per token and must not mix tokens: then their sum over the global batch, divided by the number of
tokens with a label, is the same on every layout. Losses of tokens with label -100 are ignored. The function runs where
the head is: on the last pipeline stage, on a context-parallel rank's own tokens, and with tensor parallelism on every
rank, on gathered logits. All logits of a micro-batch are then in memory in fp32, which cross entropy avoids.
"""

import inspect
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.config.model import Distillation, Headless
from kenotron.kernels.linear_cross_entropy import IGNORED
from kenotron.models.context import Context

TokenLoss = Callable[[Tensor, Tensor], Tensor]
HEADLESS = "kenotron.models.headless.HeadlessLoss"  # imported only if a config uses it


class TrainingLoss(Protocol):
    """A loss that replaces cross entropy in training; it returns (the weighted sum of losses, its z part).

    If it has a method `of_hidden`, which takes hidden states ``[tokens, hidden]`` and the head's weight instead of
    logits, this is called if the rank has the whole weight.
    """

    def of_logits(self, logits: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the loss from all logits ``[tokens, vocab]``."""


class OwnLoss:
    """A loss that is a function of logits and labels."""

    def __init__(self, function: TokenLoss) -> None:
        self.function = function

    def of_logits(self, logits: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the loss. Raises InputError unless the function returns one number per token."""
        losses = self.function(logits.float(), labels)
        if losses.shape != labels.shape:
            raise InputError(
                f"model.loss: expected a loss for every token, of shape {list(labels.shape)}, found "
                f"{list(losses.shape)}; torch's functions return that with reduction='none'"
            )
        return sum_of_losses(losses.float(), labels, ctx)


def load_loss(setting: str | Headless | Distillation | None) -> TrainingLoss | None:
    """Return the loss that `model.loss` names; None for cross entropy, and for distillation, whose loss is in `ctx`.

    Raises InputError if a dotted path does not lead to a suitable function.
    """
    if setting is None or isinstance(setting, Distillation):
        return None
    if not isinstance(setting, str):
        return import_dotted(HEADLESS, "model.loss")(setting)
    found = import_dotted(setting, "model.loss")
    if not callable(found):
        raise InputError(f"model.loss: expected a function at '{setting}', found {found!r}")
    try:
        inspect.signature(found).bind("logits", "labels")
    except TypeError as error:
        raise InputError(f"model.loss: {setting} cannot be called with (logits, labels): {error}") from None
    except ValueError:  # a function in C that does not show its arguments
        pass
    return OwnLoss(found)


def sum_of_losses(losses: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """Return (the sum of `losses` over tokens that have a label, with the weights of `ctx`; its z part, 0)."""
    losses = torch.where(labels == IGNORED, 0.0, losses)
    total = (losses if ctx.token_weights is None else losses * ctx.token_weights).sum() * ctx.loss_scale
    return total, torch.zeros_like(total)
