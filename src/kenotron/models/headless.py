"""The headless loss (contrastive weight tying): the next token among a batch's own tokens, by their embeddings.

Hidden state h_i is to be nearer to the embedding e of its next token y_i than to those of other next tokens in a set:

    loss_i = -log  exp(h_i e(y_i) / t)  /  sum over j of the set  exp(h_i e(y_j) / t)           t: the temperature

A token that is in the set twice counts twice, as does the right one. There is no product with the whole vocabulary, and
gradients reach embeddings from both sides. Which set decides what a loss depends on (`negatives`):

    sequence      the sequence of i                                       the same on every layout
    block         the block of `block_size` neighbours of i in it         the same on every layout
    batch         the global batch, by a bias of log(how often) on the logits of all of the vocabulary         as well
    micro_batch   the micro-batch: what the original does; the loss changes with micro_batch_size and dp

Source: Godey et al., "Headless language models: learning without predicting with contrastive weight tying"
(arXiv 2309.08351). Their code counts the right token once more in the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.config.model import Headless
from kenotron.kernels.linear_cross_entropy import IGNORED
from kenotron.kernels.products import linear
from kenotron.models.context import Context
from kenotron.models.token_loss import sum_of_losses

# Scores of some tokens beside those in the second argument, as next ones; None: beside all of the vocabulary.
Score = Callable[[slice, Tensor | None], Tensor]
ABSENT = -1e30  # in the place of minus infinity, whose softmax alone is not a number


@dataclass(frozen=True, eq=False)
class HeadlessLoss:
    """`settings` of the config; `counts` ``[vocab]``: how often each token is a label of the global batch."""

    settings: Headless
    counts: Tensor | None = None

    def of_hidden(self, hidden: Tensor, weight: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """(the loss of hidden states ``[tokens, hidden]`` under embeddings `weight` ``[vocab, hidden]``, 0)."""

        def score(rows: slice, among: Tensor | None) -> Tensor:
            return linear(hidden[rows], weight if among is None else F.embedding(among, weight))

        return self._sum(score, labels, ctx)

    def of_logits(self, logits: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """The same, where ranks have parts of the embeddings: from all logits ``[tokens, vocab]``."""

        def score(rows: slice, among: Tensor | None) -> Tensor:
            return logits[rows] if among is None else logits[rows].index_select(1, among)

        return self._sum(score, labels, ctx)

    def _sum(self, score: Score, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        losses = [self._losses(score, labels[rows], rows) for rows in self._sets(ctx)]
        return sum_of_losses(torch.cat(losses), labels, ctx)

    def _losses(self, score: Score, labels: Tensor, rows: slice) -> Tensor:
        """Of the tokens `rows`, of which those that have a label are the set."""
        right, temperature = labels.clamp(min=0), self.settings.temperature
        if self.counts is not None:
            scores = score(rows, None)[:, : len(self.counts)].float() / temperature
            return (scores + self.counts.log().clamp(min=ABSENT)).logsumexp(1) - scores.gather(1, right[:, None])[:, 0]
        scores = score(rows, right).float() / temperature
        return scores.masked_fill(labels == IGNORED, ABSENT).logsumexp(1) - scores.diagonal()

    def _sets(self, ctx: Context) -> list[slice]:
        sequences, length = ctx.shape
        size = self.settings.tokens_of_a_set(sequences, length) or length
        return [slice(start, start + size) for start in range(0, sequences * length, size)]
