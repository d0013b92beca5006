"""A training step is plain mathematics: the same as transformers and torch.optim in a dozen lines."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.training.step import Numbers
from support import user_parts
from support.hub_cache import make_tokenizer_repository
from support.tiny_run import (
    largest_difference,
    losses,
    metrics,
    saved_weights,
    text_overrides,
    tiny_config,
    train_quietly,
    weights,
)

SGD = "optimizer.optimizer_factory={name: sgd, momentum: 0.9}"


def hf_model(config: Any, initial: dict[str, Tensor]) -> torch.nn.Module:
    """transformers' Llama of the config's shapes with the given weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    shapes = config.model.architecture
    names = """hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
        rms_norm_eps max_position_embeddings tie_word_embeddings"""
    theirs = LlamaConfig(
        **{name: getattr(shapes, name) for name in names.split()},
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    )
    model = LlamaForCausalLM(theirs)
    missing = model.load_state_dict(initial, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])
    return model


def plain_training(run: Any, make: Any, rates: list[float]) -> tuple[torch.nn.Module, list[float], list[float]]:
    """The run's steps in plain code: the model, and losses and gradient norms by step."""
    config = run.config
    model = hf_model(config, saved_weights(Path(config.checkpoints.checkpoints_path) / "0"))
    optimizer = make(model.parameters())
    seen, norms = [], []
    for step, rate in enumerate(rates, 1):
        for group in optimizer.param_groups:
            group["lr"] = rate
        batches = run.data.batch(step)
        tokens = torch.cat([torch.from_numpy(batch.tokens) for batch in batches])
        labels = torch.cat([torch.from_numpy(batch.labels) for batch in batches])
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return model, seen, norms


@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("kind", ["sgd", "adamW"])
def test_weights_after_some_steps_are_those_of_transformers_and_torch(kind: str, tied: str, tmp_path: Path) -> None:
    # A large epsilon: Adam would blow up the rounding of gradients that are almost 0 to whole steps.
    overrides = ["optimizer.optimizer_factory.adam_eps=1.0e-4"]
    if kind == "sgd":
        overrides = [SGD, "optimizer.learning_rate_scheduler.learning_rate=0.5"]
    overrides += ["checkpoints.save_initial_state=true", "optimizer.clip_grad=0.5", "tokens.train_steps=4"]
    overrides += ["tokens.batch_accumulation_per_replica=2", f"model.model_config.tie_word_embeddings={tied}"]
    config = tiny_config(tmp_path, *overrides)
    run = train_quietly(config)
    peak = config.optimizer.learning_rate_scheduler.learning_rate

    def make(parameters: Any) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(parameters, momentum=0.9, weight_decay=0.1)
        return torch.optim.AdamW(parameters, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)

    model, expected_losses, norms = plain_training(run, make, [peak / 2, peak, peak, peak])
    steps = metrics(config)
    assert [step["lm_loss"] for step in steps] == pytest.approx(expected_losses, rel=2e-6)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=2e-5)
    assert max(norms) > 0.5, "clipping had nothing to do"
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    moved = largest_difference(weights(run), saved_weights(tmp_path / "checkpoints" / "0"))
    assert largest_difference(weights(run), expected) < 1e-4 * moved


def splits(folder: Path, *overrides: str) -> list[Any]:
    """The same global batch of 4 as 4 x 1, 2 x 2, 1 x 4."""
    runs = []
    for micro, accumulated in ((4, 1), (2, 2), (1, 4)):
        split = (f"tokens.micro_batch_size={micro}", f"tokens.batch_accumulation_per_replica={accumulated}")
        runs.append(train_quietly(tiny_config(folder / f"{micro}x{accumulated}", *overrides, *split)))
    return runs


def assert_same_run(runs: list[Any], loss: float, weight: float) -> None:
    first, *others = runs
    for other in others:
        assert losses(other.config) == pytest.approx(losses(first.config), rel=loss)
        assert largest_difference(weights(other), weights(first)) < weight


@pytest.mark.parametrize("factory", [SGD, "optimizer.clip_grad=1.0"], ids=["sgd", "adamW"])
def test_the_split_into_micro_batches_does_not_change_the_run(factory: str, tmp_path: Path) -> None:
    assert_same_run(splits(tmp_path, factory, "tokens.train_steps=5"), loss=1e-6, weight=1e-5)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_micro_batches_with_uneven_real_tokens_weigh_every_token_the_same(packing: str, tmp_path: Path) -> None:
    """Document masking takes the loss from the last token of each document, here and there."""
    overrides = [*text_overrides(tmp_path), "model.document_masking=true", "tokens.sequence_length=24"]
    overrides.append(f"data_stages.0.data.dataset.packing={packing}")
    overrides.append("general.hooks=[support.user_parts.Gradients]")
    runs = splits(tmp_path, *overrides, "checkpoints.save_initial_state=true", "optimizer.clip_grad=null")
    per_micro_batch = [int((batch.labels != -100).sum()) for batch in runs[2].data.batch(1)]
    assert len(set(per_micro_batch)) > 1, "the micro-batches are even: nothing is tested"
    assert_same_run(runs, loss=1e-6, weight=1e-5)

    config = runs[0].config
    model = hf_model(config, saved_weights(Path(config.checkpoints.checkpoints_path) / "0"))
    total, count = torch.zeros(()), 0
    for batch in runs[0].data.batch(1):
        for tokens, labels, documents in zip(batch.tokens, batch.labels, batch.documents, strict=True):
            for document in sorted(set(documents)):  # each alone
                where = documents == document
                logits = model(torch.from_numpy(tokens[where])[None]).logits[0]
                total = total + F.cross_entropy(logits, torch.from_numpy(labels[where]), reduction="sum")
        count += int((batch.labels != -100).sum())
    assert count == metrics(config)[0]["real_tokens"]
    assert losses(config)[0] == pytest.approx(total.item() / count, rel=1e-6)

    (total / count).backward()
    given = next(hook for hook in runs[0].hooks if isinstance(hook, user_parts.Gradients)).first
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert wanted.keys() == given.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(given[name], gradient, rtol=2e-5, atol=1e-6 * float(gradient.abs().max()), msg=name)


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(tmp_path: Path) -> None:
    hook = "general.hooks=[support.user_parts.Spy]"
    run = train_quietly(tiny_config(tmp_path, "model.dtype=bfloat16", hook))
    (spy,) = (hook for hook in run.hooks if isinstance(hook, user_parts.Spy))
    assert spy.compute == {torch.bfloat16}  # what goes into every linear, and what comes out
    assert spy.gradients == {torch.float32}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in saved_weights(tmp_path / "checkpoints" / "3").values()} == {torch.float32}
    moments = saved_weights(tmp_path / "checkpoints" / "3", "optimizer")
    assert {tensor.dtype for tensor in moments.values()} == {torch.float32}
    # Masters hold more than bf16 can: rounding them would change most.
    master = weights(run)["model.embed_tokens.weight"]
    assert (master.bfloat16().float() != master).float().mean() > 0.9


def test_fp32_is_fp32_throughout(tmp_path: Path) -> None:
    run = train_quietly(tiny_config(tmp_path, "general.hooks=[support.user_parts.Spy]"))
    (spy,) = (hook for hook in run.hooks if isinstance(hook, user_parts.Spy))
    assert spy.compute == spy.gradients == {torch.float32}


def test_the_learning_rate_is_applied_printed_and_written_alike(tmp_path: Path) -> None:
    keys = "learning_rate: 0.01, lr_warmup_steps: 2, lr_decay_style: linear, min_decay_lr: 0.002"
    schedule = (f"optimizer.learning_rate_scheduler={{{keys}}}", "tokens.train_steps=6")
    groups = "optimizer.param_groups=[{pattern: embed_tokens, learning_rate_scale: 0.5}]"
    run = train_quietly(tiny_config(tmp_path, *schedule, groups, "general.hooks=[support.user_parts.Spy]"))
    (spy,) = (hook for hook in run.hooks if isinstance(hook, user_parts.Spy))
    curve = [0.005, 0.01, 0.008, 0.006, 0.004, 0.002]
    assert [step["lr"] for step in metrics(run.config)] == pytest.approx(curve)
    assert spy.rates == [pytest.approx([rate / 2, rate]) for rate in curve]


def test_the_loss_of_a_step_leaves_the_z_loss_out_and_shows_it_apart(tmp_path: Path) -> None:
    keys = ("model.model_config.z_loss_enabled=true", "model.model_config.z_loss_coefficient=0.5")
    with_z = train_quietly(tiny_config(tmp_path / "with", *keys)).config
    without = train_quietly(tiny_config(tmp_path / "without")).config
    assert losses(with_z)[0] == pytest.approx(losses(without)[0], rel=1e-6)
    assert losses(with_z)[2] != losses(without)[2]  # it moved the weights
    assert 0.5 * 3 < metrics(with_z)[0]["z_loss"] < 0.5 * 25  # log(64) is 4.2
    assert "z_loss" not in metrics(without)[0]


def test_padding_the_vocabulary_changes_neither_the_run_nor_the_saved_files(tmp_path: Path) -> None:
    runs = {}
    for multiple in (1, 48):  # 64 tokens in 96 rows
        config = tiny_config(tmp_path / str(multiple), f"model.make_vocab_size_divisible_by={multiple}")
        runs[multiple] = train_quietly(config)
    assert runs[48].model.model.embed_tokens.weight.shape == (96, 16)
    assert losses(runs[48].config) == pytest.approx(losses(runs[1].config), rel=1e-6)
    for part in ("model", "optimizer"):
        plain, padded = (saved_weights(tmp_path / m / "checkpoints" / "3", part) for m in ("1", "48"))
        assert {name: tensor.shape for name, tensor in plain.items()} == {n: t.shape for n, t in padded.items()}
        assert largest_difference(plain, padded) < 1e-6


def test_the_update_waits_for_the_host_only_for_a_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU fused Adam is queued before the numbers are read: the run is the same, to fp32's rounding."""
    order: list[str] = []
    monkeypatch.setattr(Numbers, "read", lambda self, read=Numbers.read: order.append("read") or read(self))
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: order.append("update") or step(self))
    runs = []
    for name, changes in (("host", ()), ("device", ()), ("hook", ("general.hooks=[support.user_parts.Recorder]",))):
        order.clear()
        runs.append(losses(train_quietly(tiny_config(tmp_path / name, "tokens.train_steps=3", *changes)).config))
        assert order == (["update", "read"] if name == "device" else ["read", "update"]) * 3
        monkeypatch.setattr("kenotron.optim.clip.reads_are_free", lambda tensor: False)
    host, device, hook = runs
    assert hook == pytest.approx(host, abs=1e-6)
    assert device == pytest.approx(host, abs=1e-6)


# ---- prompts and answers: the answers' tokens are learnt and no others -------------------------------------

ROWS = [{"prompt": f"word{a} word{b} ", "completion": f"word{a + b} word{b}"} for a in range(9) for b in range(9)]
DATASET = "data_stages.0.data.dataset"


def answers(folder: Path) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = make_tokenizer_repository(folder / "hub", "robot/words")
    return [
        f"{DATASET}={{text_files: {file}, sft_dataloader: true}}",
        f"tokenizer.tokenizer_name_or_path={words}",
        *("model.model_config.vocab_size=200", "model.model_config.eos_token_id=2"),
        *("checkpoints.save_initial_state=true", "tokens.train_steps=1"),
    ]


def test_the_loss_is_that_of_the_answers_of_each_example_alone(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *answers(tmp_path))
    run = train_quietly(config)
    model = hf_model(config, saved_weights(tmp_path / "checkpoints" / "0"))
    total, count = 0.0, 0
    for batch in run.data.batch(1):
        for row in batch.tokens.tolist():
            # Two words, two words with a loss, the end; what follows the last example is padding: the end, too.
            for first in range(0, len(row) - 3, 5):
                example = torch.tensor([*row[first : first + 4], 2])
                if example[0] == 2:
                    continue
                logits = model(example[None, :-1]).logits[0]
                total += F.cross_entropy(logits[1:], example[2:], reduction="sum").item()
                count += 3
    assert count == metrics(config)[0]["real_tokens"]
    assert losses(config)[0] == pytest.approx(total / count, rel=1e-6)
