"""Several update rules in one run: each moves its own parameters as it would alone."""

import pytest
import torch

from kenotron.config import load
from kenotron.config.errors import InputError
from kenotron.config.optimizer import LearningRateScheduler
from kenotron.generation.load import load_for_generation
from kenotron.interop import to_hf
from kenotron.optim.build import build_optimizer
from kenotron.optim.groups import set_learning_rates
from optim.test_build_optimizer import train
from support.tiny_run import equal_bits, exported, metrics, saved_weights, text_overrides, tiny_config, train_quietly

RULES = {
    "proj": {"name": "lion"},
    "norm": {"name": "sgd", "momentum": 0.9},
    "embed_tokens": {"name": "Adagrad"},  # its state is there before the first step
}


def several(section):
    return section(param_groups=[{"pattern": name, "optimizer_factory": rule} for name, rule in RULES.items()])


def test_each_moves_its_own_as_it_would_alone(tiny, section, set_gradients):
    together = tiny()
    train(together, build_optimizer(together.named_parameters(), several(section)), set_gradients)
    for pattern, rule in {**RULES, "lm_head": {"name": "adamW"}}.items():
        alone = tiny()
        train(alone, build_optimizer(alone.named_parameters(), section(rule)), set_gradients)
        expected = dict(alone.named_parameters())
        for name, parameter in together.named_parameters():
            if pattern in name:
                assert torch.equal(parameter, expected[name]), name


def test_a_group_follows_its_own_schedule(tiny, section):
    own = {"learning_rate": 4.0, "lr_decay_style": "linear", "min_decay_lr": 0.0}
    rules = [{"pattern": "proj", "learning_rate_scheduler": own, "learning_rate_scale": 0.5}]
    config = section(param_groups=rules)
    optimizer = build_optimizer(tiny().named_parameters(), config)
    schedule = LearningRateScheduler(learning_rate=3.0, lr_decay_style="constant")
    assert set_learning_rates(optimizer, schedule, 1, 4) == 3.0
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [1.5, 3.0]
    set_learning_rates(optimizer, schedule, 3, 4)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.5, 3.0]


@pytest.mark.parametrize("name", ["muon", "normuon", "soap"])
@pytest.mark.parametrize(
    ("pattern", "first"), [("embed_tokens", "embed_tokens"), ("lm_head", "lm_head"), ("layers", "up_proj.bias")]
)
def test_an_optimizer_of_matrices_is_given_nothing_else(tiny, section, name, pattern, first):
    config = section(param_groups=[{"pattern": pattern, "optimizer_factory": {"name": name}}])
    said = rf"param_groups: '{pattern}' gives .*{first}.* to {name}, which is for hidden"
    with pytest.raises(InputError, match=said):
        build_optimizer(tiny().named_parameters(), config)
    matrices = section(param_groups=[{"pattern": r"proj\.weight", "optimizer_factory": {"name": name}}])
    build_optimizer(tiny().named_parameters(), matrices)


def test_the_average_of_bf16_weights_moves_by_less_than_they_round(tiny, section, set_gradients):
    """Weights come back with the same bits, and the average keeps its own."""
    model = tiny().bfloat16()
    optimizer = build_optimizer(model.named_parameters(), section(ema_decay=0.999))
    expected = None
    for step in range(30):
        train(model, optimizer, set_gradients, [step])
        weight = model.lm_head.weight.detach().double()
        expected = weight.clone() if expected is None else 0.999 * expected + 0.001 * weight
    average = optimizer.state[model.lm_head.weight]["ema"]
    kept = average.clone()
    torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-8)
    with optimizer.averaged():
        assert torch.equal(model.lm_head.weight, expected.bfloat16())
    assert torch.equal(model.lm_head.weight.double(), weight)
    assert torch.equal(average, kept)


def test_the_average_of_a_run_is_validated_resumed_decoded_and_exported(tmp_path, shell):
    """Step 4 after a stop at 2 as without one; a run that starts from the export has the loss that was logged."""
    overrides = (*text_overrides(tmp_path), "optimizer.ema_decay=0.5", "checkpoints.checkpoint_interval=2")
    overrides += ("tokens.val_check_interval=2", "tokens.limit_val_batches=-1", "tokens.val_fraction=0.2")
    stop = "general.hooks=[{path: support.user_parts.StopAt, kwargs: {step: 2}}]"
    whole = tiny_config(tmp_path / "whole", *overrides, "tokens.train_steps=4")
    short = tiny_config(tmp_path / "short", *overrides, "tokens.train_steps=4")
    for config in (whole, load(short, [stop]), short):
        train_quietly(config)
    one, other = (saved_weights(tmp_path / name / "checkpoints" / "4", "optimizer") for name in ("whole", "short"))
    assert any(name.endswith(".ema") for name in one)
    assert equal_bits(one, other)
    logged = {line["iteration"]: line["val_loss_ema"] for line in metrics(whole) if "val_loss_ema" in line}
    assert logged.keys() == {2, 4}
    to_hf(tmp_path / "whole" / "checkpoints" / "4", tmp_path / "smooth", dtype="float32", ema=True)
    smooth = exported(tmp_path / "smooth")
    assert {f"state.{name}.ema" for name in smooth} == {name for name in one if name.endswith(".ema")}
    assert all(torch.equal(smooth[name], one[f"state.{name}.ema"]) for name in smooth)
    checkpoint = tmp_path / "whole" / "checkpoints"
    options = ("--prompt", "Once", "--json", "--logprobs", "--dtype", "float32")
    ways = ((checkpoint, "--ema"), (tmp_path / "smooth",), (checkpoint,))
    texts = [shell("generate", *way, *options)[:2] for way in ways]
    assert texts[0][0] == 0
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    with pytest.raises(InputError, match="smooth has no moving average of weights: it is a Hugging Face model"):
        load_for_generation(tmp_path / "smooth", ema=True)
    still = ("optimizer.ema_decay=null", "optimizer.learning_rate_scheduler={learning_rate: 1.0e-12}")
    steps = ("tokens.train_steps=1", "tokens.val_check_interval=1", f"model.init_method={{path: {tmp_path}/smooth}}")
    again = tiny_config(tmp_path / "again", *overrides, *still, *steps)
    train_quietly(again)
    (line,) = (line for line in metrics(again) if "val_loss" in line)
    assert line["val_loss"] == pytest.approx(logged[4], rel=1e-5)
    with pytest.raises(InputError, match="has no moving average of weights"):
        to_hf(tmp_path / "again" / "checkpoints" / "1", tmp_path / "no", ema=True)
