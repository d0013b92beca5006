"""A training loss of your own: `model.loss` names a function of logits and labels. (`headless` has its own module.)

    def label_smoothing(logits, labels):                # logits [tokens, vocab] fp32, labels [tokens], -100: no loss
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)             # [tokens]

It returns one loss for every token and must not mix tokens: their sum over the global batch, divided by the number of
real tokens, is then the same on every layout. What it returns where the label is -100 is ignored. It runs where the
head is: on the last pipeline rank, on a context-parallel rank's own tokens, and with tensor parallelism on every rank,
over gathered logits. All logits of a micro-batch are then in memory in fp32, which cross entropy avoids.
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
HEADLESS = "kenotron.models.headless.HeadlessLoss"  # imported where a config asks for it


class TrainingLoss(Protocol):
    """What a head computes in training in the place of cross entropy: (the weighted sum of losses, its z part).

    One that has a method `of_hidden`, with hidden states ``[tokens, hidden]`` and the head's weight in the place of
    logits, is asked for that where one rank has the weight.
    """

    def of_logits(self, logits: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """From all logits ``[tokens, vocab]``."""


class OwnLoss:
    """A loss that is a function of logits and labels."""

    def __init__(self, function: TokenLoss) -> None:
        self.function = function

    def of_logits(self, logits: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Raises `InputError` unless the function returns one number for every token."""
        losses = self.function(logits.float(), labels)
        if losses.shape != labels.shape:
            raise InputError(
                f"model.loss: expected a loss for every token, of shape {list(labels.shape)}, found "
                f"{list(losses.shape)}; torch's functions return that with reduction='none'"
            )
        return sum_of_losses(losses.float(), labels, ctx)


def load_loss(setting: str | Headless | Distillation | None) -> TrainingLoss | None:
    """What `model.loss` names; None for cross entropy, and for distillation, whose loss each micro-batch has.

    Raises `InputError` where there is no function at a path.
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
    """(the sum of `losses` over tokens that have a label, weighted as `ctx` says; its z part, 0)."""
    losses = torch.where(labels == IGNORED, 0.0, losses)
    total = (losses if ctx.token_weights is None else losses * ctx.token_weights).sum() * ctx.loss_scale
    return total, torch.zeros_like(total)
