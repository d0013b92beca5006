"""The headless loss (contrastive weight tying) predicts the next token among a batch's tokens, by their embeddings.

Hidden state h_i should be closer to the embedding e of its next token y_i than to those of other labels in a set:

    loss_i = -log  exp(h_i e(y_i) / t)  /  sum over j of the set  exp(h_i e(y_j) / t)           t: the temperature

A token that is in the set twice counts twice, also the correct one. There is no product with the whole vocabulary, and
gradients reach embeddings as inputs and as targets. `negatives` chooses the set, and with it what the loss depends on:

    sequence      the sequence of i                                       the same on every layout
    block         the `block_size` tokens of its sequence around i        the same on every layout
    batch         the global batch, by adding log(count) to the logits of the whole vocabulary: the same on every layout
    micro_batch   the micro-batch, as in the original: the loss changes with micro_batch_size and dp

Source: Godey et al., "Headless language models: learning without predicting with contrastive weight tying"
(arXiv 2309.08351). The authors' code counts the correct token once more in the sum.
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

# (rows, candidates) → scores of the candidates as next tokens of these rows; candidates None: the whole vocabulary.
Score = Callable[[slice, Tensor | None], Tensor]
ABSENT = -1e30  # instead of minus infinity: the softmax of only infinities is nan


@dataclass(frozen=True, eq=False)
class HeadlessLoss:
    """The loss with the config's `settings`; `counts` ``[vocab]`` of each token as a label in the global batch."""

    settings: Headless
    counts: Tensor | None = None

    def of_hidden(self, hidden: Tensor, weight: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return (the loss of hidden states ``[tokens, hidden]`` with embeddings `weight` ``[vocab, hidden]``, 0)."""

        def score(rows: slice, among: Tensor | None) -> Tensor:
            return linear(hidden[rows], weight if among is None else F.embedding(among, weight))

        return self._sum(score, labels, ctx)

    def of_logits(self, logits: Tensor, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """Return the same from all logits ``[tokens, vocab]``, for ranks that have shards of the embeddings."""

        def score(rows: slice, among: Tensor | None) -> Tensor:
            return logits[rows] if among is None else logits[rows].index_select(1, among)

        return self._sum(score, labels, ctx)

    def _sum(self, score: Score, labels: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        losses = [self._losses(score, labels[rows], rows) for rows in self._sets(ctx)]
        return sum_of_losses(torch.cat(losses), labels, ctx)

    def _losses(self, score: Score, labels: Tensor, rows: slice) -> Tensor:
        """Return the losses of the tokens `rows`; the labels of those that have one are the set."""
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
