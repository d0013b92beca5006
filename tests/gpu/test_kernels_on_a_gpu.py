"""Kernels on a GPU: every attention function against the eager one in float64, and those in Triton against formulas."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.kernels import mamba_packages
from kenotron.kernels.attention import Borders
from kenotron.kernels.attentions import choice
from kenotron.kernels.attentions.masked import eager
from kenotron.kernels.products import ALONE, Linears
from support import mamba_cases

SEQUENCES, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 320, 4, 2, 64
DOCUMENTS = (0, 5, 130, 320, 321, 500, 640)
# In fp32 sums in another order. In bf16 the probabilities and what they are multiplied by are rounded: 2 to 3 times
# 0.2% of the norm, as kernels on a CPU have it (tests/kernels/test_attention_kernel.py).
ATTENTION = {"float32": 1e-5, "bfloat16": 1e-2}
TRITON = {"float32": 2e-6, "bfloat16": 6e-3}
# mamba_ssm's exponentials are the GPU's fast ones; in bf16 its Mamba-2 rounds products and the states of chunks, too.
MAMBA = {"float32": 1e-4, "bfloat16": 3e-2}


def attended(function, tensors: tuple[Tensor, ...], grad: Tensor, cu_seqlens, **options) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, Borders(cu_seqlens), 0, HEAD_DIM**-0.5, **options)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("dtype", ATTENTION)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cu_seqlens", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("name", [name for name in choice.IMPLEMENTATIONS if name != "eager"])
def test_attention_equals_the_eager_one(name: str, cu_seqlens, window, dtype: str, device: torch.device) -> None:
    facts = choice.facts_of(device)._replace(
        dtype=dtype, head_dim=HEAD_DIM, documents=cu_seqlens is not None, window=window is not None
    )
    if problem := choice.IMPLEMENTATIONS[name].problem(facts):
        pytest.skip(f"{name} {problem}")
    try:
        function = choice.load(name)
    except (InputError, ImportError) as error:
        pytest.fail(f"{name} was offered and cannot be loaded: {error}")
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(SEQUENCES, LENGTH, heads, HEAD_DIM).to(device, getattr(torch, dtype)).transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    found = attended(function, (q, k, v), grad, cu_seqlens, window=window)
    exact = attended(eager, tuple(x.double() for x in (q, k, v)), grad, cu_seqlens, window=window)
    assert len(found) == len(exact) == 4
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact)]
    assert max(errors) < ATTENTION[dtype], errors


def test_gradients_of_weights_are_rounded_once(device: torch.device) -> None:
    """Products of bf16 add up in fp32, and on CUDA the sum is not rounded to bf16, whose error is 2e-3."""
    if device.type == "cpu" or torch.version.hip is not None:
        pytest.skip("products of bf16 with a result in fp32 are cuBLAS's")
    x, dy = (torch.randn(4096, width, device=device, dtype=torch.bfloat16) for width in (256, 384))
    weight = torch.randn(384, 256, device=device, requires_grad=True)
    (y,) = Linears.apply(x, ALONE, weight, None)
    (found,) = torch.autograd.grad(y, weight, dy)
    exact = dy.double().t() @ x.double()
    assert found.dtype == torch.float32
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("dtype", TRITON)
def test_kernels_in_triton_equal_formulas_and_their_plain_twins(dtype: str, device: torch.device) -> None:
    pytest.importorskip("triton")
    if device.type == "cpu" and (dtype != "float32" or not os.environ.get("TRITON_INTERPRET")):
        pytest.skip("on a CPU in Triton's interpreter (TRITON_INTERPRET=1), which truncates in bf16")
    from support import triton_numbers

    torch.manual_seed(0)
    with torch.device(device):
        cases = list(triton_numbers.cases(getattr(torch, dtype)))
    assert len(cases) == 15
    for name, ours, plain, formula, arguments in cases:
        found = triton_numbers.results(ours, arguments)
        exact = triton_numbers.results(formula, tuple(x.double() for x in arguments))
        assert {x.dtype for x in found} == {arguments[0].dtype}, name
        assert triton_numbers.distance(found, exact) < TRITON[dtype], name
        assert triton_numbers.distance(found, triton_numbers.results(plain, arguments)) < TRITON[dtype], name


@pytest.mark.parametrize("dtype", MAMBA)
@pytest.mark.parametrize("length", [2, 600])
@pytest.mark.parametrize(("name", "documents", "goes_on"), mamba_cases.CASES)
def test_mamba_by_packages_equals_the_plain_one_in_float64(
    name: str, documents: bool, goes_on: bool, length: int, dtype: str, gpu_only: torch.device
) -> None:
    given = (name, length, documents, goes_on, getattr(torch, dtype))
    if mamba_packages.packaged(name, torch.empty(1, 2, dtype=given[-1], device=gpu_only)) is None:
        pytest.skip(f"{mamba_packages.PACKAGES[name][1]} is not installed")
    found = mamba_cases.everything(*given, device=gpu_only)
    exact = mamba_cases.everything(*given, wide=True, device=gpu_only)
    assert mamba_cases.largest_error(found, exact) < MAMBA[dtype]
