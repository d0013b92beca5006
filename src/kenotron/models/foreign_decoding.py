"""Generate with a foreign model: with its own cache, or by processing the whole text again for every token.

    prompts a b c | x y       CachedTexts    a b c    then   d        one token per text; keys and values of the other
                                             . x y           z        tokens are in transformers' cache
                              WholeTexts     a b c    then   a b c d
                                             x y .           x y z .

A cache grows at its end for all texts at once, so shorter texts are padded on the left: a mask hides the padding, and
positions do not count it. Without a cache, padding is on the right, where a causal model does not attend to it, whether
it accepts a mask or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kenotron.kernels.attention import attention
from kenotron.models.context import Context

if TYPE_CHECKING:
    from transformers import Cache

    from kenotron.models.foreign_model import ForeignModel


def next_logits(model: ForeignModel, tokens: Tensor, ctx: Context) -> Tensor:
    """Return logits ``[texts, vocab]`` after the last token of each text.

    In the first call, `tokens` are the concatenated prompts, which ``ctx.cu_seqlens`` separates; in later calls, one
    new token of each text. ``ctx.states`` keeps the texts from call to call.
    """
    assert ctx.states is not None
    texts: CachedTexts | WholeTexts
    if ctx.cu_seqlens is not None:
        prompts = list(tokens.split(torch.tensor(ctx.cu_seqlens).diff().tolist()))
        padded = len(set(map(len, prompts))) > 1
        cached = model.foreign.has_cache(model.foreign_module, padded)
        texts = CachedTexts(prompts) if cached else WholeTexts(prompts)
    else:
        found = ctx.states.recall(0)
        assert found is not None, "a step without prompts before it"
        texts = cast("CachedTexts | WholeTexts", found[0])
        texts.append(tokens)
    ctx.states.remember(0, (cast("Tensor", texts),))  # states only index it by text
    return texts.next_logits(model)


class CachedTexts:
    """Texts of which only the `new` tokens go through the model; transformers' cache has the others."""

    def __init__(self, prompts: list[Tensor]) -> None:
        self.new = pad_sequence(prompts, batch_first=True, padding_side="left")
        self.mask = pad_sequence([torch.ones_like(each) for each in prompts], batch_first=True, padding_side="left")
        self.cache: Cache | None = None

    def append(self, tokens: Tensor) -> None:
        """Append one token to each text, ``[texts]``."""
        self.new, self.mask = tokens[:, None], F.pad(self.mask, (0, 1), value=1)

    def next_logits(self, model: ForeignModel) -> Tensor:
        """Return logits ``[texts, vocab]`` and add the new tokens to the cache."""
        with model.autocast(self.new.device), model.state_kept():
            logits, self.cache = model.foreign.cached_logits(model.foreign_module, self.new, self.mask, self.cache)
        return logits

    def __getitem__(self, rows: Tensor) -> CachedTexts:
        self.new, self.mask = self.new[rows], self.mask[rows]
        if self.cache is not None:
            self.cache.batch_select_indices(rows)
        return self


class WholeTexts:
    """Texts that go through the model again for every token."""

    def __init__(self, prompts: list[Tensor]) -> None:
        self.tokens = pad_sequence(prompts, batch_first=True)
        self.lengths = torch.tensor([len(each) for each in prompts], device=self.tokens.device)

    def append(self, tokens: Tensor) -> None:
        """As in `CachedTexts`."""
        self.tokens, self.lengths = F.pad(self.tokens, (0, 1)), self.lengths + 1
        self.tokens.scatter_(1, self.lengths[:, None] - 1, tokens[:, None])

    def next_logits(self, model: ForeignModel) -> Tensor:
        """As in `CachedTexts`."""
        rows, longest = self.tokens.shape
        positions = torch.arange(longest, device=self.tokens.device).repeat(rows)
        logits = model.logits(self.tokens, Context((rows, longest), positions, attention), model.compute_dtype)
        return logits[torch.arange(rows, device=self.tokens.device), self.lengths - 1]

    def __getitem__(self, rows: Tensor) -> WholeTexts:
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]
        return self
