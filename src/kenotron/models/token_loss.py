"""A training loss of your own: `model.loss` names a function of logits and labels.

    def label_smoothing(logits, labels):                # logits [tokens, vocab] fp32, labels [tokens], -100: no loss
        return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)             # [tokens]

It returns one loss for every token and must not mix tokens: their sum over the global batch, divided by the number of
real tokens, is then the same on every layout. What it returns where the label is -100 is ignored. It runs where the
head is: on the last pipeline rank, on a context-parallel rank's own tokens, and with tensor parallelism on every rank,
over gathered logits. All logits of a micro-batch are then in memory in fp32, which cross entropy avoids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.kernels.linear_cross_entropy import IGNORED

if TYPE_CHECKING:
    from torch import Tensor

    from kenotron.models.context import Context

TokenLoss = Callable[["Tensor", "Tensor"], "Tensor"]


def load_loss(path: str | None) -> TokenLoss | None:
    """The function behind `model.loss`; None for cross entropy. Raises `InputError` where there is none at `path`."""
    if path is None:
        return None
    found = import_dotted(path, "model.loss")
    if not callable(found):
        raise InputError(f"model.loss: expected a function at '{path}', found {found!r}")
    return found


def sum_of_losses(loss: TokenLoss, logits: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """(the sum of `loss` over tokens that have a label, weighted as `ctx` says; its z part, 0), as a head returns them.

    Raises `InputError` unless `loss` returns one number for every token.
    """
    losses = loss(logits.float(), labels)
    if losses.shape != labels.shape:
        raise InputError(
            f"model.loss: expected a loss for every token, of shape {list(labels.shape)}, found {list(losses.shape)}; "
            "torch's functions return that with reduction='none'"
        )
    losses = torch.where(labels == IGNORED, 0.0, losses.float())
    total = (losses if ctx.token_weights is None else losses * ctx.token_weights).sum() * ctx.loss_scale
    return total, torch.zeros_like(total)
