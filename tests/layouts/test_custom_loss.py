"""A loss by dotted path means the same on every layout, and what is no loss is refused."""

from pathlib import Path

import pytest
import torch

import kenotron as kn
from kenotron.config.errors import InputError
from kenotron.kernels.attention import attention
from kenotron.models import Context
from kenotron.models.token_loss import OwnLoss, load_loss
from support.layout_runs import Problem
from support.tiny_run import tiny_config, train_quietly
from support.user_parts import mean_loss, smoothed

PATH = "model.loss=support.user_parts.smoothed"
SMOOTHED = Problem("smoothed", (PATH,), steps=2, model={"z_loss_enabled": False})
LAYOUTS = ["tp=2", "tp=2 mode=REDUCE_SCATTER", "cp=2", "pp=2 engine=1f1b accum=4", "dp=2 zero=3"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_custom_loss_is_the_same_on_every_layout(layout, like_one_process):
    like_one_process(2, SMOOTHED, layout)


HEADLESS = {
    "sequence": "negatives: sequence",
    "block": "negatives: block, block_size: 4, temperature: 0.5",
    "batch": "negatives: batch",
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("negatives", HEADLESS)
@pytest.mark.parametrize("layout", [*(each for each in LAYOUTS if "cp" not in each), "dp=2 accum=1"])
def test_the_headless_loss_is_the_same_on_every_layout(layout, negatives, like_one_process):
    loss = f"model.loss={{name: headless, {HEADLESS[negatives]}}}"
    model = {"tie_word_embeddings": True, "z_loss_enabled": False}
    like_one_process(2, Problem(f"headless_{negatives}", (loss,), model=model), layout)


def context(scale: float, weights: torch.Tensor | None = None) -> Context:
    """Of two sequences of three tokens."""
    return Context((2, 3), torch.arange(6), attention, loss_scale=scale, sequence_weights=weights)


def test_it_is_the_sum_over_tokens_with_a_label_and_validation_stays_cross_entropy(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 4, -100, 2, 1, -100])
    real = labels != -100
    losses, weights = smoothed(logits[real], labels[real]), torch.tensor([0.5, 2.0])
    weighted = losses @ weights[[0, 0, 1, 1]].double()
    plain = OwnLoss(smoothed).of_logits(logits, labels, context(0.25))[0]
    assert plain.item() == pytest.approx(losses.sum().item() / 4, rel=1e-6)
    found = OwnLoss(smoothed).of_logits(logits, labels, context(0.25, weights))[0]
    assert found.item() == pytest.approx(weighted.item() / 4, rel=1e-6)

    validate = ("tokens.val_check_interval=1", "tokens.limit_val_batches=1", "tokens.train_steps=1")
    validate += ("optimizer.learning_rate_scheduler.learning_rate=1e-12",)
    plain = train_quietly(tiny_config(tmp_path / "plain", *validate))
    custom = train_quietly(tiny_config(tmp_path / "custom", *validate, PATH))
    assert custom.last_metrics["lm_loss"] != plain.last_metrics["lm_loss"]
    assert custom.last_metrics["val_loss"] == pytest.approx(plain.last_metrics["val_loss"], rel=1e-6)


def test_what_is_no_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model.loss: module 'support.user_parts' has no 'smoothd'; did you mean"):
        load_loss("support.user_parts.smoothd")
    with pytest.raises(InputError, match=r"model.loss: math.isfinite cannot be called with .logits, labels.: "):
        load_loss("math.isfinite")
    with pytest.raises(InputError, match=r"model.loss: expected a function at 'support.user_parts.__name__'"):
        load_loss("support.user_parts.__name__")
    with pytest.raises(InputError, match=r"a loss for every token, of shape \[3\], found \[\].*reduction='none'"):
        OwnLoss(mean_loss).of_logits(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), context(1.0))
    with pytest.raises(InputError, match=r"z_loss_enabled.* is part of cross entropy; expected false with model.loss"):
        tiny_config(tmp_path, PATH, "model.model_config.z_loss_enabled=true")
    with pytest.raises(InputError, match=r"model\.loss"):
        kn.load(tiny_config(tmp_path).model_dump(mode="json", by_alias=True), ["model.loss=focal"])
