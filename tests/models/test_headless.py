"""The headless loss against its formula in float64, and what a run with it needs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.config.model import Headless
from kenotron.kernels.attention import attention
from kenotron.models import Context
from kenotron.models.headless import HeadlessLoss
from kenotron.training.metrics import FlopsPerToken
from support.tiny_run import tiny_config, train_quietly

VOCAB, WIDTH, SHAPE = 11, 6, (2, 8)
TIED = "model.model_config.tie_word_embeddings=true"


def context(shape: tuple[int, int] = SHAPE, weights: Tensor | None = None, scale: float = 0.5) -> Context:
    return Context(shape, torch.arange(shape[0] * shape[1]), attention, loss_scale=scale, sequence_weights=weights)


def loss_of(counts: Tensor | None = None, **keys: Any) -> HeadlessLoss:
    return HeadlessLoss(Headless(name="headless", **keys), counts)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator) for rows in (16, VOCAB))
    labels = torch.randint(VOCAB, (16,), generator=generator)
    labels[[2, 9, *range(4, 8)]] = -100  # also of a whole block
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def by_hand(hidden: Tensor, weight: Tensor, labels: Tensor, size: int, temperature: float = 1.0) -> Tensor:
    """Losses in float64, each over the set of `size` neighbours that it is in; 0 without a label."""
    h, e = hidden.double(), weight.double()
    losses = []
    for i, label in enumerate(labels.tolist()):
        start = i // size * size
        others = [j for j in labels[start : start + size].tolist() if j >= 0]
        scores = torch.stack([h[i] @ e[j] for j in others]) / temperature if others else h[:0, 0]
        losses.append(scores.logsumexp(0) - h[i] @ e[label] / temperature if label >= 0 else h[i].sum() * 0)
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        *(({}, 8), ({"negatives": "block", "block_size": 4}, 4)),
        *(({"negatives": "micro_batch", "temperature": 0.7}, 16), ({"negatives": "batch", "temperature": 0.7}, 16)),
    ],
    ids=str,
)
def test_losses_and_gradients_follow_the_formula(keys: dict[str, Any], size: int) -> None:
    hidden, weight, labels = inputs()
    weights = torch.tensor([0.5, 2.0])
    expected = by_hand(hidden, weight, labels, size, keys.get("temperature", 1.0))
    expected = 0.5 * (expected * weights.double().repeat_interleave(8)).sum()
    wanted = torch.autograd.grad(expected, (hidden, weight))
    counts = torch.bincount(labels[labels >= 0], minlength=VOCAB).float()  # of a global batch of one micro-batch
    loss, ctx = loss_of(counts if keys.get("negatives") == "batch" else None, **keys), context(weights=weights)
    padded = F.pad(weight, (0, 0, 0, 3), value=9.0)  # rows that pad the vocabulary
    for found in (loss.of_hidden(hidden, padded, labels, ctx), loss.of_logits(F.linear(hidden, weight), labels, ctx)):
        assert found[0].item() == pytest.approx(expected.item(), rel=1e-5)
        assert found[1].item() == 0.0
        for gradient, reference in zip(torch.autograd.grad(found[0], (hidden, weight)), wanted, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_flops_count_the_tokens_of_a_set(tmp_path: Path) -> None:
    """Three times 2 x hidden FLOPs for each row of the head that is not multiplied by."""
    run = train_quietly(tiny_config(tmp_path, TIED, "tokens.train_steps=1"))
    plain, headless = (FlopsPerToken.of(run.skeleton, 16, False, scored) for scored in (None, 16))
    config = run.skeleton.config
    assert plain.flops - headless.flops == 3 * 2 * config.hidden_size * (config.vocab_size - 16)
    causal = [each.flops * each.causal_share for each in (plain, headless)]
    assert causal[0] - causal[1] == pytest.approx(plain.flops - headless.flops)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.loss=headless"], "model.loss: expected a map of keys, found 'headless'; set model.loss.name=headless"),
        (["model.loss={name: headles}"], r"model.loss.name: .*'headless'"),
        (["model.loss={name: headless}"], "tie_word_embeddings: expected true: the headless loss has embeddings"),
        ([TIED, "model.loss={name: headless, negatives: block}"], "block_size: expected with negatives: block"),
        ([TIED, "model.loss={name: headless, negatives: block, block_size: 5}"], "a divisor of sequence_length"),
        ([TIED, "model.loss={name: headless}", "parallelism.context_parallel_size=2"], "needs whole sequences"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_config(tmp_path, *overrides)
