"""Buffers that a module's own forward pass writes are part of the run: saved, resumed, the same on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kenotron.config import Config, load
from kenotron.config.errors import InputError
from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import load_for_generation
from kenotron.interop import from_hf, resolve_architecture, to_hf
from kenotron.observers.snapshot import Snapshot
from kenotron.observers.validation import evaluate
from kenotron.parallel.data import evaluating
from kenotron.parallel.mesh import Mesh
from kenotron.training.step import to_device, train_step
from support.foreign_models import plain_config, random_model
from support.layout_runs import prepared, train_here
from support.ranks import run_ranks
from support.tiny_run import equal_bits, losses, saved_weights, slow_copies, train_and_listen, train_quietly

EVERY_STEP = "checkpoints.checkpoint_interval=1"
BUFFERS = ("seen", "mean", "met")


class Remembering(nn.Module):
    """Counts tokens, marks those that it has met, and adds the running mean of their embeddings."""

    def __init__(self, vocab_size: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width)])
        self.head = nn.Linear(width, vocab_size)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("met", torch.zeros(vocab_size, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits: Tensor = self.head(self.blocks[0](x + self.mean).tanh())
        self.seen += tokens.numel()
        self.met[tokens.flatten()] = True
        self.mean = (self.mean + x.detach().mean((0, 1))) / 2  # a new tensor in its place
        self.scratch += 1
        return logits


class Elsewhere(Remembering):
    """Has state that is no buffer."""

    def get_extra_state(self) -> Any:
        return {"seen": 1}


class Complex(Remembering):
    """Has numbers that checkpoints do not hold."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.register_buffer("angles", torch.ones(3, dtype=torch.complex64))


def configure(folder: Path, *overrides: str, **keys: Any) -> Config:
    model = {"module": f"{__name__}.Remembering", "vocab_size": 61} | keys
    return load(plain_config(folder, model, {"std": 0.3, "scaling_method": "NONE"}), [EVERY_STEP, *overrides])


def buffers(folder: Path, step: int) -> dict[str, Tensor]:
    saved = saved_weights(folder / "checkpoints" / str(step))
    return {name: saved[name] for name in BUFFERS}


@pytest.mark.parametrize("engine", ["torch", "datastates"])
def test_they_are_saved_as_forward_left_them_and_resumed(engine: str, tmp_path: Path, monkeypatch: Any) -> None:
    slow_copies(monkeypatch)
    saves = f"checkpoints.checkpointing_engine={engine}"
    whole = train_quietly(configure(tmp_path / "whole", saves, "tokens.train_steps=5")).config
    with prepared(whole, Mesh()) as run:
        tokens = [torch.from_numpy(run.data.batch(step, 0, 1)[0].tokens) for step in range(1, 6)]
    for step in range(1, 6):
        found = buffers(tmp_path / "whole", step)
        assert int(found["seen"]) == 64 * step
        assert found["met"].nonzero().flatten().tolist() == torch.cat(tokens[:step]).unique().tolist()
        if step > 1:
            before = saved_weights(tmp_path / "whole" / "checkpoints" / str(step - 1))
            expected = (before["mean"] + before["embedding.weight"][tokens[step - 1]].mean((0, 1))) / 2
            assert torch.allclose(found["mean"], expected, rtol=1e-6, atol=1e-8)
    assert "scratch" not in saved_weights(tmp_path / "whole" / "checkpoints" / "5")

    parts = train_quietly(configure(tmp_path / "parts", saves, "tokens.train_steps=2")).config
    train_quietly(configure(tmp_path / "parts", saves, "tokens.train_steps=5"))
    assert losses(parts) == losses(whole)
    ours, theirs = (saved_weights(tmp_path / name / "checkpoints" / "5") for name in ("parts", "whole"))
    assert equal_bits(ours, theirs)


def test_only_steps_that_are_done_change_them(tmp_path: Path) -> None:
    poison = "general.hooks=[{path: support.user_parts.Poison, kwargs: {steps: [2]}}]"
    train_and_listen(configure(tmp_path, poison))
    assert int(buffers(tmp_path, 1)["seen"]) == 64
    assert equal_bits(buffers(tmp_path, 1), buffers(tmp_path, 2)), "the skipped step"
    assert int(buffers(tmp_path, 3)["seen"]) == 128


def test_validation_and_generation_leave_them(tmp_path: Path) -> None:
    config = train_quietly(configure(tmp_path)).config
    with prepared(config, Mesh()) as run:
        (batch,) = run.data.batch(1, 0, 1)
        train_step(run, [batch])
        before = {name: buffer.clone() for name, buffer in run.model.saved_buffers().items()}
        assert int(before["seen"]) == 64
        with evaluating(run.parts, run.roots), torch.no_grad():
            evaluate(run, to_device(batch, run))
        assert equal_bits(run.model.saved_buffers(), before)
        snapshot = Snapshot()
        snapshot.take(run)
        train_step(run, [batch])
        assert int(run.model.saved_buffers()["seen"]) == 128
        snapshot.restore(run)
        assert equal_bits(run.model.saved_buffers(), before)
    model = load_for_generation(tmp_path / "checkpoints", "float32").model
    assert isinstance(model, nn.Module)
    generate(model, None, [[3, 1, 4]], SamplingOptions(max_new_tokens=5))
    assert equal_bits({name: model.get_buffer(name) for name in BUFFERS}, buffers(tmp_path, 3))


def trained(rank: int, folder: Path) -> list[float]:
    """On two data-parallel ranks whose replicas are compared before every save."""
    layout = ("parallelism.dp=2", "tokens.micro_batch_size=2", "general.ignore_sanity_checks=false")
    run = train_here(configure(folder, *layout))
    return [*run.model.get_buffer("mean").tolist(), float(run.model.get_buffer("seen"))]


def test_ranks_take_those_of_the_first_one(tmp_path: Path) -> None:
    one, other = run_ranks(2, trained, tmp_path)
    assert one == other
    assert one[-1] == 3 * 32  # what the first rank has read
    with prepared(configure(tmp_path, "tokens.micro_batch_size=2", "parallelism.dp=2"), Mesh()) as run:
        read = torch.from_numpy(run.data.batch(3, 0, 2)[0].tokens)
    before = saved_weights(tmp_path / "checkpoints" / "2")
    expected = (before["mean"] + before["embedding.weight"][read].mean((0, 1))) / 2
    assert one[:-1] == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("Elsewhere", "Elsewhere has get_extra_state.*expected its state in buffers"),
        ("Complex", "model.model_config: buffer 'angles': tensors of dtype complex64 cannot be"),
    ],
)
def test_state_that_no_checkpoint_holds_is_refused(module: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said) as error:
        train_quietly(configure(tmp_path, "checkpoints.checkpoint_interval=1000", module=f"{__name__}.{module}"))
    assert len(str(error.value).splitlines()) == 1
    assert not any(file.stat().st_size for file in tmp_path.rglob("metrics.jsonl"))


def test_the_buffers_of_a_model_of_transformers_come_with_its_weights(tmp_path: Path) -> None:
    """The router of GLM-4.5 chooses experts by scores and a correction, which is a buffer of its files."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    theirs = random_model("glm4_moe", **small, **experts, num_hidden_layers=2, head_dim=8)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    theirs.get_buffer(name).copy_(torch.tensor([0.9, -0.7, 0.4, -0.2]))
    theirs.save_pretrained(tmp_path / "theirs")
    plain = plain_config(tmp_path, {"hf": str(tmp_path / "theirs")}, {"path": str(tmp_path / "theirs")})
    config = resolve_architecture(load(plain, [EVERY_STEP]))
    with prepared(config, Mesh()) as run:
        (batch,) = run.data.batch(1, 0, 1)
        tokens = torch.from_numpy(batch.tokens)
        with torch.no_grad():
            ours = run.model(tokens.flatten(), to_device(batch, run).ctx)
            assert torch.allclose(ours, theirs(tokens).logits.flatten(0, 1), rtol=1e-4, atol=1e-5)
    train_quietly(config)
    to_hf(tmp_path / "checkpoints" / "3", tmp_path / "exported", dtype="bfloat16")
    again = type(theirs).from_pretrained(tmp_path / "exported")
    assert torch.equal(again.get_buffer(name), theirs.get_buffer(name))
    from_hf(tmp_path / "exported", tmp_path / "back")
    assert torch.equal(saved_weights(tmp_path / "back" / "0")[name], theirs.get_buffer(name))
