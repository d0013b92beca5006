"""Attention against its definition in float64: every path, GQA, documents, strides; and inside torch.compile."""

from types import SimpleNamespace

import pytest
import torch

from kenotron.kernels import attention as kernel
from kenotron.kernels import products
from kenotron.kernels.attention import attention
from support.plain_attention import numbers_of, relative_errors

WHOLE = SimpleNamespace(cu_seqlens=None)


@pytest.fixture(autouse=True)
def _bf16_is_fast(monkeypatch):
    """Where it is not, bf16 takes the path of fp32 (`test_bfloat16`), and what is tested here is never met."""
    monkeypatch.setattr(products, "EMULATED", False)


def inputs(sequences, heads, kv_heads, length, head_dim, dtype, spread=1.0):
    torch.manual_seed(0)
    shape = (sequences, length, heads, head_dim)
    q = (torch.randn(shape) * spread).to(dtype).transpose(1, 2).requires_grad_()
    shapes = [(sequences, length, kv_heads, head_dim)] * 2
    k, v = (torch.randn(each).to(dtype).transpose(1, 2).requires_grad_() for each in shapes)
    return (q, k, v), torch.randn(shape).to(dtype).transpose(1, 2)


def errors_of(tensors, grad, ctx, scale, documents=None):
    return relative_errors(lambda *qkv: attention(*qkv, ctx, 0, scale), tensors, grad, scale=scale, documents=documents)


SHAPES = [  # sequences, heads, kv_heads, length, head_dim
    *((2, 6, 6, 64, 64), (2, 6, 2, 33, 16), (1, 4, 1, 17, 8)),
    *((3, 2, 2, 1, 32), (9, 4, 2, 128, 32), (1, 2, 1, 520, 16)),
]
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])


@pytest.mark.parametrize("shape", SHAPES)
@DTYPES
def test_attention_equals_its_definition_in_float64(shape, dtype, tolerance):
    errors = errors_of(*inputs(*shape, dtype), WHOLE, 0.8 * shape[-1] ** -0.5)  # the scale that is given
    assert max(errors) < tolerance, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_dim_need_not_be_side_by_side_in_memory(dtype):
    tensors, grad = inputs(2, 4, 2, 24, 8, dtype)
    apart = [t.detach().mT.contiguous().mT.requires_grad_() for t in tensors]
    errors = errors_of(apart, grad.mT.contiguous().mT, WHOLE, 0.3)
    assert max(errors) < 1e-2, errors


def test_both_bf16_paths_are_exercised_by_those_shapes():
    chosen = {kernel._explicit_backward_is_faster(inputs(*shape, torch.bfloat16)[0][0]) for shape in SHAPES}
    assert chosen == {True, False}
    assert not kernel._explicit_backward_is_faster(inputs(*SHAPES[0], torch.float32)[0][0])


def test_the_explicit_backward_stays_near_sdpas_when_scores_are_large():
    # Scores of standard deviation 6: rounding them to bf16 must not unbalance the probabilities.
    errors = errors_of(*inputs(2, 4, 4, 128, 64, torch.bfloat16, spread=6.0), WHOLE, 0.125)
    assert max(errors) < 0.03, errors


def test_without_one_the_scale_is_that_of_a_heads_width():
    (q, k, v), _ = inputs(1, 4, 2, 20, 16, torch.float32)
    torch.testing.assert_close(attention(q, k, v, WHOLE), attention(q, k, v, WHOLE, scale=16**-0.5), rtol=0, atol=0)


# Documents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cu_seqlens",
    [
        *((0, 24, 48), (0, 5, 24, 40, 41, 48), (0, 48), (0, 1, 2, 3, 48)),
        (0, 10, 30, 48),  # the second document runs on into the second sequence: cut there
    ],
)
@DTYPES
def test_no_token_sees_another_document(cu_seqlens, dtype, tolerance):
    tensors, grad = inputs(2, 4, 2, 24, 16, dtype)
    ctx = SimpleNamespace(cu_seqlens=cu_seqlens)
    errors = errors_of(tensors, grad, ctx, 0.3, numbers_of(cu_seqlens, 2))
    assert max(errors) < tolerance, errors


@pytest.mark.parametrize("cu_seqlens", [(0, 10), (1, 48), (0, 49)])
def test_borders_that_do_not_cover_the_batch_are_refused(cu_seqlens):
    (q, k, v), _ = inputs(2, 4, 2, 24, 16, torch.float32)
    with pytest.raises(ValueError, match="expected 0 to 48"):
        attention(q, k, v, SimpleNamespace(cu_seqlens=cu_seqlens))
