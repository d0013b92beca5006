"""Mamba's scans and convolution are their recurrences, token by token in float64: values, states, every gradient."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kenotron.kernels import selective_scan as by_channel
from kenotron.kernels import state_space_dual as by_head
from kenotron.kernels.causal_conv import causal_conv
from kenotron.kernels.selective_scan import selective_scan
from kenotron.kernels.state_space_dual import state_space_dual
from support import mamba_cases
from support.mamba_cases import CHANNELS, GROUPS, HEADS, SEQUENCES, WIDTH, largest_error, random

LENGTH = 75  # chunks of 32, or of 64, and a part
# Where documents begin, chunk ends among them.
BORDERS = [*((0, at) for at in (0, 5, 32, 33, 64, 70)), (1, 31), (1, 74)]


def starts_of(borders: list[tuple[int, int]]) -> Tensor:
    starts = torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)
    starts[tuple(zip(*borders))] = True
    return starts


def channel_scan_by_tokens(x, dt, a, b, c, d, starts, state):
    h, outputs = state, []
    for t in range(x.shape[1]):
        if starts is not None:
            h = h * ~starts[:, t, None, None]
        h = (dt[:, t, :, None] * a).exp() * h + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        outputs.append((h * c[:, t, None]).sum(-1) + d * x[:, t])
    return torch.stack(outputs, 1), h


def head_scan_by_tokens(x, dt, a, b, c, d, starts, state):
    b, c = (each.repeat_interleave(HEADS // GROUPS, 2) for each in (b, c))
    h, outputs = state, []
    for t in range(x.shape[1]):
        if starts is not None:
            h = h * ~starts[:, t, None, None, None]
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        h = (dt[:, t] * a).exp()[..., None, None] * h + added
        outputs.append((h * c[:, t, :, None]).sum(-1) + d[:, None] * x[:, t])
    return torch.stack(outputs, 1), h


KINDS = {
    "by_channel": (selective_scan, channel_scan_by_tokens, mamba_cases.channel_inputs),
    "by_head": (state_space_dual, head_scan_by_tokens, mamba_cases.head_inputs),
}


def in_float64(make: Callable[[int], list[Tensor]]) -> list[Tensor]:
    """Time steps are up to about 10: many a state is forgotten at once."""
    return [each.double() for each in make(LENGTH)]


def everything(scan: Callable, inputs: list[Tensor], starts: Tensor | None) -> list[Tensor]:
    """Output, last state, and the gradient of each input for an upstream gradient of both."""
    *given, first = (each.clone().requires_grad_() for each in inputs)
    y, last = scan(*given, starts, first)
    upstream = [random(*each.shape, seed=seed).to(each) for each, seed in ((y, 7), (last, 8))]
    gradients = torch.autograd.grad([y, last], [*given, first], upstream)
    return [y.detach(), last.detach(), *gradients]


def expect_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    assert largest_error(found, expected) < tolerance


@pytest.mark.parametrize("borders", [None, BORDERS], ids=["sequences", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_by_chunks_is_the_recurrence_by_tokens(kind: str, borders: list[tuple[int, int]] | None) -> None:
    scan, by_tokens, make = KINDS[kind]
    inputs, starts = in_float64(make), None if borders is None else starts_of(borders)
    expected = everything(by_tokens, inputs, starts)
    expect_close(everything(scan, inputs, starts), expected, 1e-12)
    expect_close(everything(scan, [each.float() for each in inputs], starts), expected, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_strong_decay_over_a_whole_chunk_gives_neither_inf_nor_nan(kind: str) -> None:
    scan, by_tokens, make = KINDS[kind]
    x, dt, a, *rest = in_float64(make)
    inputs = [x, dt * 30, a * 10, *rest]  # exponents of thousands a token: exp of their positive would overflow
    expected = everything(by_tokens, inputs, None)
    found = everything(scan, [each.float() for each in inputs], None)
    assert all(each.isfinite().all() for each in found)
    expect_close(found, expected, 1e-4)


def test_both_scans_are_cut_into_several_chunks_here() -> None:
    assert by_channel.CHUNK < LENGTH
    assert by_head.CHUNK < LENGTH


@pytest.mark.parametrize("borders", [None, BORDERS], ids=["sequences", "documents"])
def test_the_convolution_is_torchs_on_every_document_by_itself(borders: list[tuple[int, int]] | None) -> None:
    x, weight, bias, _ = (each.double().requires_grad_() for each in mamba_cases.conv_inputs(LENGTH))
    starts = None if borders is None else starts_of(borders)
    rows = []
    for row in range(SEQUENCES):
        cuts = sorted({0, LENGTH, *(at for which, at in borders or [] if which == row)})
        documents = [x[row, begin:end].T for begin, end in pairwise(cuts)]
        options = {"padding": WIDTH - 1, "groups": CHANNELS}
        conv = [F.conv1d(each[None], weight, bias, **options)[0, :, : each.shape[1]] for each in documents]
        rows.append(torch.cat(conv, 1).T)
    expected = torch.stack(rows)
    found, last = causal_conv(x, weight, bias, starts)
    upstream = random(*expected.shape, seed=5).double()
    pairs = (torch.autograd.grad(each, (x, weight, bias), upstream) for each in (found, expected))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert all(torch.allclose(ours, theirs, rtol=0, atol=1e-12) for ours, theirs in zip(*pairs))
    assert torch.equal(last, x[:, 1 - WIDTH :])
