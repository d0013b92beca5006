"""Weights in oneDNN's order give the products of the same weights in rows, and are there wherever torch has them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import load_for_generation
from kenotron.generation.packed import PackedHead, PackedLinear, can_pack, pack
from kenotron.kernels.products import has_onednn
from kenotron.models.blocks.linear import Linear
from support.tiny_llamas import our_model, random_tokens, save_ours

BF16_ROUNDING = 2**-8


def linears(*widths: int, bias: bool, dtype: torch.dtype) -> list[Linear]:
    """Of 48 inputs, filled at random."""
    made = [Linear(48, width, bias) for width in widths]
    for linear in made:
        for parameter in linear.parameters():
            parameter.data = torch.randn(parameter.shape).to(dtype)
    return made


def test_torch_still_has_the_operators() -> None:
    """They are private: if this fails, `packed.py` and `kernels/products.py` have to learn their new names."""
    assert has_onednn()
    assert can_pack(torch.zeros(2, 2))
    assert not can_pack(torch.zeros(2, 2, dtype=torch.float16))
    assert not can_pack(torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, BF16_ROUNDING)])
def test_products_are_those_of_the_plain_weights(rows: int, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    if not can_pack(torch.empty(8, 8, dtype=dtype)):
        pytest.skip(f"this processor has no products of packed {dtype} weights")
    torch.manual_seed(0)
    plain, x = linears(24, 8, 40, bias=bias, dtype=dtype), torch.randn(rows, 48).to(dtype)
    one, *three = (PackedLinear(p.weight, p.bias) for p in (plain[0], *plain))
    wanted = [F.linear(x.double(), p.weight.double(), None if p.bias is None else p.bias.double()) for p in plain]
    with torch.no_grad():
        found = [one(x), *PackedLinear.grouped(x, *three), *PackedLinear.grouped(x, *three)]
    for y, exact in zip(found, [wanted[0], *wanted, *wanted], strict=True):
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=tolerance, atol=tolerance * exact.abs().max().item())


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True}])
def test_a_packed_model_generates_what_the_plain_one_does(changes: dict[str, bool], tmp_path) -> None:
    model = our_model(tmp_path, vocab_size=301, **changes)
    path = save_ours(model, tmp_path / "checkpoints", vocab_size=301, **changes)
    loaded = load_for_generation(path, device="cpu").model
    kinds = {type(module) for module in loaded.modules()}
    assert {PackedLinear, PackedHead} <= kinds
    assert Linear not in kinds
    prompts = [row.tolist() for row in random_tokens(3, 9, 1)]
    options = SamplingOptions(max_new_tokens=12, stop_at_eos=False)
    assert generate(loaded, None, prompts, options) == generate(model, None, prompts, options)


def test_linears_with_and_without_a_bias_go_together() -> None:
    torch.manual_seed(0)
    plain = linears(24, bias=False, dtype=torch.float32) + linears(8, bias=True, dtype=torch.float32)
    x = torch.randn(3, 48)
    wanted = [linear(x) for linear in plain]
    with torch.no_grad():
        found = PackedLinear.grouped(x, *(PackedLinear(p.weight, p.bias) for p in plain))
    for y, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(y, exact)


def test_float16_stays_as_it_is(tmp_path) -> None:
    model = our_model(tmp_path).half()
    pack(model)
    assert {PackedLinear, PackedHead}.isdisjoint(type(module) for module in model.modules())
