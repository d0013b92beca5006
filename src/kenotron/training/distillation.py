"""Distillation: a loss from a teacher's probabilities of the next token, and from the token itself.

    loss_i = (1 - w) (-log p(y_i))  +  w t² sum over v of  q_t(v) log(q_t(v) / p_t(v))

p is the model, q the teacher, p_t and q_t their probabilities with logits divided by the temperature t; w the weight.
All of it is computed in fp32: in bf16 the gradient, p - q, would be lost to rounding where p and q are near. With
`top_k` the sum is over the teacher's k most probable tokens, and all others as one; `teacher_cache` can store these.

Every rank with the head has the whole teacher, and runs it when it computes the loss, so that no logits are stored.

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

from kenotron.config.errors import InputError, naming
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
    from kenotron.data import RunData
    from kenotron.models import MicroBatch
    from kenotron.models.decoder import Decoder


def token_losses(settings: Distillation, logits: Tensor, teacher: Tensor | TopK, labels: Tensor) -> Tensor:
    """Return the loss ``[tokens]`` of logits ``[tokens, vocab]`` in fp32.

    `teacher`: the teacher's logits, of a vocabulary as large or larger, or its `TopK`, which include the temperature.
    """
    weight, temperature = settings.weight, settings.temperature
    scaled = logits / temperature
    if isinstance(teacher, TopK):
        distance = distance_of_top_k(scaled, teacher)
    else:
        logs = (teacher[:, : logits.shape[1]].float() / temperature).log_softmax(-1)
        distance = F.kl_div(scaled.log_softmax(-1), logs, reduction="none", log_target=True).sum(-1)
    likelihood = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)
    return (1 - weight) * likelihood + weight * temperature**2 * distance


def teaching(config: Config, parts: Sequence[Decoder], device: torch.device) -> Teaching | None:
    """Return the `Teaching` of `model.loss`, or None on ranks without the head. All ranks call it.

    Raises InputError if `teacher` is no model or has a smaller vocabulary, or if the cache is of other answers.
    """
    with_head = any(getattr(part, "lm_head", part) is not None for part in parts)  # foreign models are whole
    return raise_on_any_rank(lambda: Teaching(config, device) if with_head else None)


class Teaching:
    """Sets the loss of micro-batches to the teacher's, which is loaded at first use, or to start a cache."""

    def __init__(self, config: Config, device: torch.device) -> None:
        settings: Any = config.model.loss
        self.settings: Distillation = settings
        self.vocab_size = config.model.decoder.vocab_size
        self.load = cache(lambda: _load(self.settings, config, device))
        self.cached: TeacherCache | None = None
        k, folder = settings.top_k, settings.cache
        if k is not None and k >= self.vocab_size:
            raise InputError(
                f"model.loss.top_k: expected fewer than the {self.vocab_size} tokens of the model, found {k}"
            )
        if folder is not None:
            facts = settings.model_dump(include={"teacher", "temperature"}) | {"documents": config.masks_documents}
            self.cached = TeacherCache(Path(folder), k, config.tokens.sequence_length, self.vocab_size, facts)
        if self.cached is None or not self.cached.samples:
            self.load()  # so that its errors are raised before the data are opened

    def check(self, data: RunData) -> None:
        """Raise InputError if the cache has fewer samples than the run's data, and the teacher cannot give the rest."""
        if self.cached is None or self.cached.samples < data.samples_before(data.config.tokens.train_steps + 1):
            check_tokens(self.load()[1], data.tokenizer, f"model.loss.teacher: {self.settings.teacher}")

    def __call__(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return `micro_batch` with this loss."""

        def losses(logits: Tensor, labels: Tensor) -> Tensor:
            return token_losses(self.settings, logits, self.answers(micro_batch), labels)

        return replace(micro_batch, ctx=replace(micro_batch.ctx, loss=OwnLoss(losses)))

    def answers(self, micro_batch: MicroBatch) -> Tensor | TopK:
        """Return the teacher's logits, or with `top_k` the most probable tokens after the temperature."""
        top_k = None if self.cached is None else self.cached.read(micro_batch)
        if top_k is not None:
            return top_k
        logits = self.load()[0](micro_batch.tokens, micro_batch.ctx)
        if self.settings.top_k is None:
            return logits
        top_k = top_k_of(logits[:, : self.vocab_size].float() / self.settings.temperature, self.settings.top_k)
        if self.cached is not None:
            self.cached.write(micro_batch, top_k)
        return top_k


def _load(
    settings: Distillation, config: Config, device: torch.device
) -> tuple[Callable[[Tensor, Context], Tensor], TextTokenizer | None]:
    with naming("model.loss.teacher"):
        loaded = load_for_generation(settings.teacher, config.model.dtype, device)
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
