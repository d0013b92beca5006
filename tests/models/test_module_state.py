"""Only what checkpoints hold lasts from one call of a foreign module to the next, and recomputation writes nothing."""

from __future__ import annotations

import itertools
import logging
import random
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kenotron.config import Config, load
from kenotron.config.errors import InputError
from kenotron.interop import resolve_architecture
from kenotron.kernels.attention import attention
from kenotron.models import Context, build, initialize_model, named_parameters
from kenotron.models.foreign import HUGGING_FACE
from kenotron.models.foreign_model import ForeignModel
from kenotron.models.module_state import check_state
from kenotron.parallel.mesh import Mesh
from kenotron.training.step import count_real_tokens, forward_backward
from support.foreign_models import folder_of, plain_config
from support.layout_runs import prepared
from support.tiny_run import losses, saved_weights, tiny_dict, train_quietly

DYNAMIC = {"max_position_embeddings": 6, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
SHAPES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}


COUNTED = {"calls": 0}


class Other:
    """Of another package than the module that holds it, called like a function."""

    __module__ = "another.package"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Block(nn.Module):
    """Counts its calls in every place that a module has, and computes with all of them; a running mean."""

    of_class = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.f = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("written", torch.zeros(()), persistent=False)
        self.register_buffer("replaced", torch.zeros(()), persistent=False)
        self.calls, self.names, self.numbers, self.kinds = 0, ["a"], {"calls": 0}, {0}
        self.nested, self.own, self.last = {"calls": [0]}, SimpleNamespace(calls=0), deque([0])
        self.array, self.fixed, self.other = np.zeros(2), ([0], 1), Other()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            self.written += 1
            self.replaced = self.replaced + 1
        self.calls += 1
        self.names.append("b")
        self.numbers["calls"] += 1
        self.kinds.add(len(self.kinds))
        self.nested["calls"].append(1)
        self.own.calls += 1
        self.last.append(1)
        self.array += 1
        self.fixed[0].append(1)
        COUNTED["calls"] += 1
        Block.of_class += 1
        self.late = getattr(self, "late", 0) + 1
        counted = [self.written, self.replaced, self.calls, len(self.names), self.numbers["calls"], len(self.kinds)]
        counted += [len(self.nested["calls"]), self.own.calls, len(self.last), int(self.array[0]), len(self.fixed[0])]
        counted += [COUNTED["calls"], Block.of_class, self.other()]
        return x + 0.01 * (sum(counted) + self.late) * torch.relu(self.f(x - self.mean))


class OnlyBuffers(Block):
    """Nothing that Python sees changes."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.count += 1
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x + torch.relu(self.f(x - self.mean))


class Counting(nn.Module):
    block: type[Block] = Block

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size)
        self.layers = nn.ModuleList(self.block(8) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class CountingInBuffers(Counting):
    block = OnlyBuffers


class WritesATensor(Counting):
    """Keeps state in a tensor that is neither buffer nor parameter."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.seen = [torch.zeros(())]
        self.total = torch.zeros(())

    def forward(self, tokens: Tensor) -> Tensor:
        self.total += 1
        return super().forward(tokens)


def of_user(folder: Path, name: str = "Counting", *overrides: str) -> Config:
    model = {"module": f"{__name__}.{name}", "vocab_size": 61}
    return load(plain_config(folder, model, {"std": 0.3, "scaling_method": "NONE"}), overrides)


def made(config: Config) -> ForeignModel:
    with torch.device("meta"):
        model = build(config.model)
    model.to_empty(device="cpu")
    model.reset_buffers("cpu")
    initialize_model(model, 0.3, "NONE", seed=1)
    return model


def called(model: ForeignModel, tokens: Tensor) -> Tensor:
    ctx = Context(tuple(tokens.shape), torch.arange(tokens.shape[1]).repeat(len(tokens)), attention)  # type: ignore[arg-type]
    logits = model(tokens.flatten(), ctx)
    return logits


def test_every_call_begins_with_what_the_module_was_made_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = made(of_user(tmp_path)), torch.arange(24).view(2, 12)
    model.train(False)
    with caplog.at_level(logging.WARNING, "kenotron"):
        found = [called(model, tokens) for _ in range(2)]
        with torch.inference_mode():
            found += [called(model, tokens) for _ in range(2)]
        found.append(called(model, tokens))
    assert all(torch.equal(found[0], each) for each in found)
    block = model.foreign_module.layers[0]
    assert (block.calls, block.names, block.numbers, block.kinds) == (0, ["a"], {"calls": 0}, {0})
    assert (block.nested, block.own.calls, list(block.last)) == ({"calls": [0]}, 0, [0])
    assert (block.array.tolist(), block.fixed, block.other.calls) == ([0, 0], ([0], 1), 0)
    assert (COUNTED, Block.of_class) == ({"calls": 0}, 0)
    assert not hasattr(block, "late")
    told = [record.getMessage() for record in caplog.records if "no checkpoint holds" in record.getMessage()]
    assert len(told) == 1, "once, not at every call"
    names = ["calls", "names", "numbers", "kinds", "nested.calls", "own", "last", "late", "written", "replaced"]
    names += ["array", "fixed.0", "other"]
    for name in (*(f"layers.1.{each}" for each in names), f"{__name__}.COUNTED", "Block.of_class"):
        assert name in told[0]
    assert "count" not in told[0]


def test_a_tensor_that_is_no_buffer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"forward writes into total, a tensor that is no buffer"):
        called(made(of_user(tmp_path, "WritesATensor")), torch.arange(24).view(2, 12))


@pytest.mark.parametrize("state", [itertools.count(), random.Random(1), np.random.default_rng(1), torch.Generator()])
def test_a_position_that_no_checkpoint_holds_is_refused(state: object) -> None:
    block = Block(8)
    block.numbers_drawn = state
    with pytest.raises(InputError, match=rf"f\.0\.numbers_drawn is a {type(state).__name__}, whose position"):
        check_state(nn.ModuleDict({"f": nn.Sequential(block)}))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("module", ["Counting", "CountingInBuffers"])
def test_recomputation_gives_the_same_gradients_and_buffers(module, compiled, tmp_path, monkeypatch):
    """The blocks of the pass without recomputation are the reference."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    seen: list[tuple[Any, ...]] = []
    for recompute in ("false", "true"):
        config = of_user(tmp_path, module, f"parallelism.recompute_layer={recompute}")
        with prepared(config, Mesh()) as run:
            if compiled:
                run.model.compile_blocks()
            for step in (1, 2, 3):
                batches = run.data.batch(step, 0, 1) * 2
                loss, _ = forward_backward(run, batches, 1.0 / count_real_tokens(run, batches))
            gradients = {name: each.grad.clone() for name, each in named_parameters(run.model) if each.grad is not None}
            buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
            assert run.model.foreign_module.layers[0].calls == 0
            seen.append((float(loss), gradients, buffers))
    (loss, gradients, buffers), (again, found, written) = seen
    assert again == loss
    assert all(torch.allclose(found[name], each, rtol=1e-6, atol=1e-9) for name, each in gradients.items())
    assert {name: each.tolist() for name, each in written.items()} == {n: b.tolist() for n, b in buffers.items()}
    assert [int(buffers[f"layers.0.{name}"]) for name in ("count", "written", "replaced")] == [6, 0, 0]


def dynamic(folder: Path, source: Path, *overrides: str) -> Config:
    """transformers' Llama whose angles grow with the longest text that it has met, on sequences of 8, later 16."""
    plain = plain_config(folder, {"hf": str(source), "family": HUGGING_FACE}, {"std": 0.3, "scaling_method": "NONE"})
    (stage,) = plain["data_stages"]
    longer = stage | {"name": "longer", "start_training_step": 4}
    plain["data_stages"] = [stage | {"name": "shorter", "sequence_length": 8}, longer]
    return resolve_architecture(load(plain, ["tokens.train_steps=6", *overrides]))


def test_angles_that_grow_with_the_longest_text_met_are_no_state_of_a_run(tmp_path: Path) -> None:
    source = folder_of("llama", tmp_path, **SHAPES, **DYNAMIC)
    plain, validated, parts = (tmp_path / name for name in ("plain", "validated", "parts"))
    train_quietly(dynamic(plain, source))
    validation = ("tokens.val_check_interval=1", "tokens.limit_val_batches=1")
    train_quietly(dynamic(validated, source, *validation))
    assert losses(dynamic(validated, source)) == losses(dynamic(plain, source))
    train_quietly(dynamic(parts, source, "tokens.train_steps=4"))
    train_quietly(dynamic(parts, source))
    assert losses(dynamic(parts, source)) == losses(dynamic(plain, source))
    ours, theirs = (saved_weights(folder / "checkpoints" / "6") for folder in (parts, plain))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("model_type", "keys", "limit"),
    [
        ("llama", DYNAMIC, 6),
        ("phi3", {"max_position_embeddings": 32, "original_max_position_embeddings": 10}, 10),
        (None, DYNAMIC, 6),
    ],
)
def test_documents_that_would_change_each_others_angles_are_refused(model_type, keys, limit, tmp_path):
    if model_type == "phi3":
        half = 32 // 4 // 2
        factors = {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
        keys = keys | {"rope_scaling": {"rope_type": "longrope"} | factors}

    def configured(*overrides: str) -> Config:
        if model_type is None:
            plain = tiny_dict(tmp_path)
            plain["model"]["model_config"] |= keys
        else:
            source = folder_of(model_type, tmp_path, **SHAPES, **keys)
            plain = plain_config(tmp_path, {"hf": str(source), "family": HUGGING_FACE}, {"std": 0.1})
            plain["model"]["init_method"]["scaling_method"] = "NONE"
        return resolve_architecture(load(plain, overrides))

    expected = rf"^tokens\.sequence_length: rotary angles follow .* beyond {limit} tokens.* found 16"
    with pytest.raises(InputError, match=expected):
        configured("model.document_masking=true")
    configured("model.document_masking=true", f"tokens.sequence_length={limit}")
    with prepared(configured(), Mesh()) as run:
        (batch,) = run.data.batch(1, 0, 1)
        positions, starts = torch.arange(8).repeat(2 * len(batch.tokens)), range(0, batch.tokens.size + 1, 8)
        ctx = Context(batch.tokens.shape, positions, attention, cu_seqlens=tuple(starts))
        with pytest.raises(InputError, match=expected):  # a source of the user's own that masks documents
            run.model(torch.from_numpy(batch.tokens).flatten(), ctx)
