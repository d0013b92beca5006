"""Recomputation, selective and elementwise too, gives the bits of none, in between in memory and in what runs twice."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron.kernels.attention import attention
from kenotron.kernels.attentions.masked import eager
from kenotron.models import Context, build, initialize_model
from kenotron.models.decoder import Decoder
from kenotron.planner.ledger import Ledger
from kenotron.training.metrics import FlopsPerToken
from support.layout_runs import problem_of_family

SEQUENCES, LENGTH = 2, 64
BORDERS = (0, 24, 64, 65, 128)
SOFTCAP = partial(eager, softcap=2.0)  # Gemma 2's
FAMILIES = [
    *("llama", "mistral", "olmo2", "qwen3", "gpt_neox", "nano_with_value_embeddings"),
    *("mixtral", "deepseek_v3", "mamba", "mamba2", "nemotron_h", "nemotron_h_of_experts"),
]


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def model_of(family: str, recompute: bool | str, folder: Path, *overrides: str) -> Decoder:
    config = problem_of_family(family, *overrides).config("accum=1", folder)
    model = build(config.model)
    model.reset_buffers("cpu")
    initialize_model(model, std=0.25, scaling="NUM_LAYERS", seed=3)
    model.set_recompute(recompute)  # type: ignore[arg-type]
    return model


def batch(model: Decoder, borders: tuple[int, ...] | None, attend: Any = attention) -> tuple[Tensor, Context, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(model.config.vocab_size, (2, SEQUENCES * LENGTH), generator=draw)
    positions = torch.arange(LENGTH).repeat(SEQUENCES)
    return tokens, Context((SEQUENCES, LENGTH), positions, attend, cu_seqlens=borders), labels


def outcome(model: Decoder, *batch: Any) -> dict[str, Tensor]:
    loss = model(*batch)[0]
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | found | {name: each.clone() for name, each in model.named_buffers()}


@pytest.mark.cases(8)
@pytest.mark.parametrize("borders", [None, BORDERS], ids=["whole", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_have_the_same_bits(family: str, borders: tuple[int, ...] | None, tmp_path: Path) -> None:
    attend = SOFTCAP if family == "nano_with_value_embeddings" else attention
    found = []
    for recompute in (False, True, "selective", "elementwise"):
        model = model_of(family, recompute, tmp_path)
        found.append(outcome(model, *batch(model, borders, attend)))
    plain, *others = found
    for recomputed in others:
        assert plain.keys() == recomputed.keys()
        assert [name for name in plain if not torch.equal(plain[name], recomputed[name])] == []


# Llama 3.1 8B's ratios.
WIDE = [f"model.model_config.{each}" for each in ("hidden_size=128", "intermediate_size=448", "num_key_value_heads=2")]


WAYS: tuple[bool | str, ...] = (False, "elementwise", "selective", True)


def kept(recompute: bool | str, folder: Path) -> int:
    """Bytes of what forward leaves in memory besides the head's."""
    model = model_of("llama", recompute, folder, *WIDE)
    tokens, ctx, _ = batch(model, None)
    with Ledger() as ledger:
        hidden = model.model(tokens, ctx)
        ledger.name("weights", model.parameters())
        assert hidden.requires_grad
        return sum(storage.size for storage in ledger.live.values() if storage.kind != "weights")


def test_memory_lies_between_none_and_full(tmp_path: Path) -> None:
    none, elementwise, selective, full = (kept(each, tmp_path) for each in WAYS)
    assert full < selective <= 0.45 * none
    assert selective < elementwise <= 0.7 * none


def test_attention_and_its_products_run_once_and_gate_and_up_twice(tmp_path: Path) -> None:
    counts = {}
    for recompute in WAYS:
        model = model_of("llama", recompute, tmp_path, *WIDE)
        tokens, ctx, labels = batch(model, None)
        with Calls() as calls:
            model(tokens, ctx, labels)[0].backward()
        products = sum(calls.of[name] for name in ("mm", "addmm", "rows_by_matrix"))
        counts[recompute] = products, calls.of["_scaled_dot_product_flash_attention_for_cpu"]
    layers = 4
    plain, attended = counts[False]
    assert attended == layers
    assert counts[True] == (plain + 6 * layers, 2 * layers)  # down's result is not needed
    assert counts["selective"] == (plain + 2 * layers, layers)
    assert counts["elementwise"] == counts[False]


def test_hardware_flops_have_gate_up_and_down_twice(tmp_path: Path) -> None:
    model = model_of("llama", False, tmp_path, *WIDE)
    none, elementwise, selective, full = (FlopsPerToken.of(model, LENGTH, each) for each in WAYS)
    assert none.hardware_factor == 1.0
    assert none.hardware_factor <= elementwise.hardware_factor < selective.hardware_factor
    again = 4 * 3 * 2 * 128 * 448
    assert selective.flops * (selective.hardware_factor - 1) == pytest.approx(again)
    assert full.hardware_factor > selective.hardware_factor
