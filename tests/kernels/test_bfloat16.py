"""Where bfloat16 is fast: by what the processor says; where it is not, products and attention are those of fp32."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels import products
from kenotron.kernels.attention import Borders, attention
from kenotron.kernels.bfloat16 import bfloat16_is_fast
from kenotron.kernels.fused import use_kernels
from kenotron.kernels.products import in_fp32, linear, write_gradient
from kenotron.optim.muon import matmul_dtype

AMX = {"amx_bf16": True, "avx512_bf16": True, "cpu_name": "Intel Xeon"}
MASKED = AMX | {"amx_bf16": False}
EPYC = {"amx_bf16": False, "avx512_bf16": True, "cpu_name": "AMD EPYC"}


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [(AMX, True), (MASKED, False), (EPYC, True), (EPYC | {"avx512_bf16": False}, False), ({}, False)],
)
def test_it_is_fast_with_amx_and_on_amd_with_the_instruction(capabilities, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    device = torch.device("cpu")
    assert bfloat16_is_fast(device) is fast
    assert matmul_dtype(device, torch.bfloat16) == (torch.bfloat16 if fast else torch.float32)
    assert matmul_dtype(device, torch.float32) == torch.float32
    assert bfloat16_is_fast(torch.device("cuda"))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without a fast instruction for bf16."""
    monkeypatch.setattr(products, "EMULATED", True)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_rounded_once(found: Tensor | None, exact: Tensor) -> None:
    """Within one rounding to bf16 of the float64 result, and what fp32 sums may move beside."""
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * exact.abs().max()).all()


@pytest.mark.parametrize("bias", [False, True])
def test_where_it_is_emulated_products_are_rounded_once(bias: bool, emulated: None) -> None:
    inputs = [each.requires_grad_() for each in (draw(3, 17, 48), draw(31, 48), *([draw(31)] if bias else []))]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    y, exact, dy = linear(*inputs), F.linear(*wide), draw(3, 17, 31)
    assert_rounded_once(y.detach(), exact.detach())
    ours, theirs = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(exact, wide, dy.double())
    for found, expected in zip(ours, theirs, strict=True):
        assert_rounded_once(found, expected)
    x, dx = draw(20, 48), draw(20, 31)
    onto = torch.ones(31, 48)
    write_gradient(dx, x, onto, add=True)
    assert (onto - 1 - dx.double().t() @ x.double()).abs().max() < 0.05


def test_where_it_is_emulated_attention_is_that_of_fp32(emulated: None) -> None:
    inputs = [draw(2, heads, 12, 8).requires_grad_() for heads in (4, 2, 2)]
    wide = [each.detach().float().requires_grad_() for each in inputs]
    documents, dy = Borders((0, 5, 12, 24)), draw(2, 4, 12, 8)
    y, expected = attention(*inputs, documents), attention(*wide, documents)
    assert torch.equal(y, expected.bfloat16())
    for found, gradient in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, wide, dy.float())):
        assert torch.equal(found, gradient.bfloat16())


def test_torchs_own_kernels_and_other_devices_keep_it(emulated: None) -> None:
    x, weight = draw(8, 16), draw(24, 16)
    assert in_fp32(x, weight)
    assert not in_fp32(x.float(), weight.float())
    assert not in_fp32(x.to("meta"), weight.to("meta"))
    with use_kernels("torch"):
        assert not in_fp32(x, weight)
