"""Distillation: the next token as a teacher sees it, beside what it was.

    loss_i = (1 - w) (-log p(y_i))  +  w t² sum over v of  q_t(v) log(q_t(v) / p_t(v))

p is the model, q the teacher, p_t and q_t their probabilities with logits divided by the temperature t; w the weight.
All of it is computed in fp32: in bf16 the gradient, p - q, is lost where the two are near. With `top_k` the sum is over
the teacher's k most probable tokens, and all others as one; a cache (`teacher_cache`) keeps those.

The teacher is whole on every rank that has the head, and computes when the loss does, so that no logits wait.

Source: Hinton et al., "Distilling the knowledge in a neural network" (arXiv 1503.02531).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.generation.load import load_for_generation
from kenotron.kernels.attentions.choice import attention_of_run
from kenotron.kernels.linear_cross_entropy import IGNORED
from kenotron.models.context import Context
from kenotron.models.token_loss import OwnLoss
from kenotron.parallel.ranks import raise_on_any_rank
from kenotron.text.tokenizer import TextTokenizer, check_tokens
from kenotron.training.teacher_cache import TeacherCache, TopK, top_k_of
from kenotron.training.teacher_cache import distance as distance_of_top_k

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.config.model import Distillation
    from kenotron.models import MicroBatch
    from kenotron.models.decoder import Decoder


def token_losses(settings: Distillation, logits: Tensor, theirs: Tensor | TopK, labels: Tensor) -> Tensor:
    """The loss of every token, of logits ``[tokens, vocab]`` in fp32.

    `theirs`: the teacher's logits, of as many tokens or more, or the most probable ones with the temperature.
    """
    weight, temperature = settings.weight, settings.temperature
    ours = logits / temperature
    if isinstance(theirs, TopK):
        distance = distance_of_top_k(ours, theirs)
    else:
        logs = (theirs[:, : logits.shape[1]].float() / temperature).log_softmax(-1)
        distance = F.kl_div(ours.log_softmax(-1), logs, reduction="none", log_target=True).sum(-1)
    likelihood = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    return (1 - weight) * likelihood + weight * temperature**2 * distance


def teaching(config: Config, parts: Sequence[Decoder], device: torch.device) -> Teaching | None:
    """What gives a micro-batch the teacher of `model.loss`; None on ranks that have no head. All ranks call it.

    Raises InputError: no model at `teacher`, or one of fewer tokens; a cache of something else.
    """
    with_head = any(getattr(part, "lm_head", part) is not None for part in parts)  # foreign ones are whole
    return raise_on_any_rank(lambda: Teaching(config, device) if with_head else None)


class Teaching:
    """Gives a micro-batch its loss by the teacher, which is loaded when it is asked first, or to begin a cache."""

    def __init__(self, config: Config, device: torch.device) -> None:
        settings: Any = config.model.loss
        self.settings: Distillation = settings
        self.vocab_size = config.model.decoder.vocab_size
        self.load = cache(lambda: _load(self.settings, config, device))
        self.known: TeacherCache | None = None
        k, folder = settings.top_k, settings.cache
        if k is not None and k >= self.vocab_size:
            raise InputError(
                f"model.loss.top_k: expected fewer than the {self.vocab_size} tokens of the model, found {k}"
            )
        if folder is not None:
            facts = settings.model_dump(include={"teacher", "temperature"}) | {"documents": config.masks_documents}
            self.known = TeacherCache(Path(folder), k, config.tokens.sequence_length, self.vocab_size, facts)
        self.asked = self.known is None or not self.known.begun
        if self.asked:
            self.load()  # what is wrong with it is said before the first step

    def check(self, tokenizer: TextTokenizer | None) -> None:
        """Raise InputError if a teacher that is asked knows other tokens than the run's `tokenizer`."""
        if self.asked:
            check_tokens(self.load()[1], tokenizer, f"model.loss.teacher: {self.settings.teacher}")

    def __call__(self, micro_batch: MicroBatch) -> MicroBatch:
        """`micro_batch` with the loss."""

        def losses(logits: Tensor, labels: Tensor) -> Tensor:
            return token_losses(self.settings, logits, self.answers(micro_batch), labels)

        return replace(micro_batch, ctx=replace(micro_batch.ctx, loss=OwnLoss(losses)))

    def answers(self, micro_batch: MicroBatch) -> Tensor | TopK:
        """What the teacher says: logits, or the most probable tokens with the temperature."""
        found = None if self.known is None else self.known.read(micro_batch)
        if found is not None:
            return found
        logits = self.load()[0](micro_batch.tokens, micro_batch.ctx)
        if self.settings.top_k is None:
            return logits
        found = top_k_of(logits[:, : self.vocab_size].float() / self.settings.temperature, self.settings.top_k)
        if self.known is not None:
            self.known.write(micro_batch, found)
        return found


def _load(
    settings: Distillation, config: Config, device: torch.device
) -> tuple[Callable[[Tensor, Context], Tensor], TextTokenizer | None]:
    try:
        loaded = load_for_generation(settings.teacher, config.model.dtype, device)
    except InputError as error:
        raise InputError(f"model.loss.teacher: {error}") from None
    model: Any = loaded.model
    vocab_size = config.model.decoder.vocab_size
    if model.config.vocab_size < vocab_size:
        raise InputError(
            f"model.loss.teacher: expected a vocabulary of {vocab_size} or more, as this model's, found "
            f"{model.config.vocab_size} in {settings.teacher}"
        )
    attention, _ = attention_of_run(config.model_copy(update={"model": loaded.config}), device)

    @torch.no_grad()
    def teacher(tokens: Tensor, ctx: Context) -> Tensor:
        return model(tokens, replace(ctx, attention=attention))

    return teacher, loaded.tokenizer
