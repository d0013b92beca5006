"""The language-model head maps hidden states to logits, or directly to the summed loss.

In training, the logits are the largest tensor of a small model (tokens x vocabulary), so the loss is computed together
with the projection, and the logits never exist as a whole in fp32.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kenotron.kernels.linear_cross_entropy import VocabularyRanks, linear_cross_entropy
from kenotron.kernels.products import linear
from kenotron.models.context import Context


def bounded(logits: Tensor, softcap: float | None) -> Tensor:
    """Return ``c tanh(logits / c)`` for a `softcap` c, computed in fp32, in the logits' dtype; None: the logits."""
    return logits if softcap is None else (softcap * torch.tanh(logits.float() / softcap)).to(logits.dtype)


class LMHead(nn.Module):
    """The head's matrix has `rows` rows, of which `vocab_size` are tokens; the others are padding, never predicted.

    `softcap` c bounds the logits s: ``c tanh(s / c)`` (Gemma 2, arXiv 2408.00118); None: they are not bounded.
    """

    ranks: VocabularyRanks | None = None  # the ranks that share the rows, set by `parallel.tensor`

    def __init__(
        self, hidden_size: int, vocab_size: int, rows: int, z_loss: float, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        self.vocab_size, self.z_loss, self.softcap = vocab_size, z_loss, softcap

    def tie(self, weight: nn.Parameter) -> None:
        """Share the embedding's matrix: one parameter, one gradient, saved once."""
        self.weight = weight

    def forward(self, hidden: Tensor, ctx: Context, labels: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits ``[logits_to_keep, vocab]``, or with labels (loss to call backward on, its z part)."""
        hidden, weight = self.operands(hidden)
        if labels is None:
            return self.logits(hidden if ctx.logits_to_keep is None else hidden[ctx.logits_to_keep], weight)
        of_hidden = getattr(ctx.loss, "of_hidden", None)
        if of_hidden is not None and self.ranks is None:
            return of_hidden(hidden, weight.to(hidden.dtype), labels, ctx)
        if ctx.loss is not None:
            return ctx.loss.of_logits(self.logits(hidden, weight), labels, ctx)
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            scale=ctx.loss_scale,
            z_loss=self.z_loss,
            valid_rows=self.vocab_size,
            softcap=self.softcap,
            token_weights=ctx.token_weights,
            ranks=self.ranks,
        )

    def operands(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two factors of the logits: hidden states, and this rank's rows of the matrix, in its dtype."""
        return hidden, self.weight

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits ``[tokens, vocab]`` from `operands`."""
        logits = linear(hidden, weight.to(hidden.dtype))
        return bounded(logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size], self.softcap)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of one token's forward pass."""
        return 2.0 * self.vocab_size * self.weight.shape[1]


class WithLoss(torch.autograd.Function):
    """Returns x unchanged; in backward, `loss` gets the gradient 1, as a summand of the training loss would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return upstream[0], upstream[0].new_ones(())
