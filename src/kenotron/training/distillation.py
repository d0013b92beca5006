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


def teaching(
    config: Config, parts: Sequence[Decoder], device: torch.device
) -> Callable[[MicroBatch], MicroBatch] | None:
    """What gives a micro-batch the teacher of `model.loss`; None on ranks that have no head. All ranks call it.

    Raises InputError: no model at `teacher`, or one of fewer tokens; a cache of something else.
    """
    settings: Any = config.model.loss
    with_head = any(getattr(part, "lm_head", part) is not None for part in parts)  # foreign ones are whole
    answers = raise_on_any_rank(lambda: _answers(settings, config, device) if with_head else None)
    if answers is None:
        return None

    def taught(micro_batch: MicroBatch) -> MicroBatch:
        def losses(logits: Tensor, labels: Tensor) -> Tensor:
            return token_losses(settings, logits, answers(micro_batch), labels)

        return replace(micro_batch, ctx=replace(micro_batch.ctx, loss=OwnLoss(losses)))

    return taught


def _answers(settings: Distillation, config: Config, device: torch.device) -> Callable[[MicroBatch], Tensor | TopK]:
    """What the teacher says of a micro-batch: logits, or the most probable tokens with the temperature."""
    vocab_size, k = config.model.decoder.vocab_size, settings.top_k
    load = cache(lambda: _load(settings, config, device))
    known = None
    if k is not None and k >= vocab_size:
        raise InputError(f"model.loss.top_k: expected fewer than the {vocab_size} tokens of the model, found {k}")
    if settings.cache is not None and k is not None:
        facts = settings.model_dump(include={"teacher", "temperature"}) | {"documents": config.masks_documents}
        known = TeacherCache(Path(settings.cache), k, config.tokens.sequence_length, vocab_size, facts)
    if known is None or not known.begun:
        load()  # what is wrong with it is said before the first step

    def answers(micro_batch: MicroBatch) -> Tensor | TopK:
        found = None if known is None else known.read(micro_batch)
        if found is not None:
            return found
        logits = load()(micro_batch.tokens, micro_batch.ctx)
        if k is None:
            return logits
        found = top_k_of(logits[:, :vocab_size].float() / settings.temperature, k)
        if known is not None:
            known.write(micro_batch, found)
        return found

    return answers


def _load(settings: Distillation, config: Config, device: torch.device) -> Callable[[Tensor, Context], Tensor]:
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

    return teacher
