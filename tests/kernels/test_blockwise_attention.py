"""Attention by blocks: merged, they are the whole; each block's share of the gradients adds up to autograd's."""

import pytest
import torch
from torch import Tensor

from kenotron.kernels.blockwise_attention import (
    block_attention,
    block_backward,
    merge_,
    plain_block_attention,
    plain_block_backward,
)
from support.plain_attention import plain_attention

KERNELS = [(block_attention, block_backward), (plain_block_attention, plain_block_backward)]


def tensors(heads: int, kv_heads: int, length: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, h, length, 8) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("forward", "backward"), KERNELS)
def test_three_tiles_merged_are_causal_attention_and_so_are_their_gradients(forward, backward, heads, kv_heads):
    q, k, v, grad = tensors(heads, kv_heads)
    scale, half = 0.3, 6
    corners = [(slice(0, half), slice(0, half), True), (slice(half, 12), slice(half, 12), True)]
    corners.append((slice(half, 12), slice(0, half), False))

    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=torch.float64)
    for rows, keys, causal in corners:
        part, part_lse = forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal, scale)
        merge_(out[:, :, rows], lse[:, :, rows], part, part_lse)
    gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys, causal in corners:
        tile_q, tile_out, tile_lse = (x[:, :, rows] for x in (q, out, lse))
        shares = backward(grad[:, :, rows], tile_q, k[:, :, keys], v[:, :, keys], tile_out, tile_lse, causal, scale)
        for total, share, where in zip(gradients, shares, (rows, keys, keys)):
            total[:, :, where] += share

    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = plain_attention(*inputs, scale)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    for found, right in zip(gradients, torch.autograd.grad(expected, inputs, grad)):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


def test_scores_far_apart_merge_without_overflow() -> None:
    out, lse = torch.ones(1, 1, 1, 4), torch.tensor([[[2e4]]])
    merge_(out, lse, torch.full((1, 1, 1, 4), 3.0), torch.tensor([[[-2e4]]]))
    assert torch.equal(out, torch.ones(1, 1, 1, 4))
    merge_(out, lse, torch.full((1, 1, 1, 4), 3.0), torch.tensor([[[4e4]]]))
    assert torch.equal(out, torch.full((1, 1, 1, 4), 3.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once_a_tile(dtype: torch.dtype) -> None:
    q, k, v, grad = tensors(4, 2)
    exact = plain_block_attention(q, k, v, True, 0.3)
    shares = plain_block_backward(grad, q, k, v, *exact, True, 0.3)
    half = [x.to(dtype) for x in (q, k, v)]
    out, lse = block_attention(*half, True, 0.3)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    found = block_backward(grad.to(dtype), *half, out, lse, True, 0.3)
    for a, b in zip((out, *found), (exact[0], *shares)):
        assert ((a.double() - b).norm() / b.norm()).item() < 1e-2
