"""RMSNorm, RoPE and the gated activation against their formulas in float64, with gradients and what they save."""

import math

import pytest
import torch
import torch.nn.functional as F

from kenotron.config.errors import InputError
from kenotron.kernels import rms_norm as rms_norm_kernel
from kenotron.kernels import rope as rope_kernel
from kenotron.kernels import swiglu as swiglu_kernel
from kenotron.kernels.rms_norm import rms_norm
from kenotron.kernels.rope import apply_rope, apply_rope_to_both
from kenotron.kernels.swiglu import ACTIVATIONS, swiglu
from support.autograd_bytes import bytes_saved

DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)]


def agree(function, reference, arguments, tolerance):
    """Output and the gradients of all tensor arguments, relative to float64; returns the output."""
    exact = [a.detach().double().requires_grad_() for a in arguments]
    leaves = [a.detach().clone().requires_grad_() for a in arguments]
    out, expected = function(*leaves), reference(*exact)
    assert out.dtype == arguments[0].dtype
    assert out.shape == expected.shape
    torch.manual_seed(5)
    grad = torch.randn(out.shape).to(out.dtype)
    out.backward(grad)
    expected.backward(grad.double())
    pairs = [(out, expected)] + [(a.grad, b.grad) for a, b in zip(leaves, exact)]
    for ours, right in pairs:
        error, size = float((ours.detach().double() - right.detach()).norm()), float(right.detach().norm())
        assert error <= tolerance * size, (error, size)
    return out.detach()


# RMSNorm ------------------------------------------------------------------------------------------


def norm_formula(x, weight):
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (7, 384), (3, 5, 64), (700, 257)])
def test_rms_norm_equals_its_formula(shape, dtype, tolerance):
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.rand(shape[-1]).to(dtype)
    agree(lambda x, w: rms_norm(x, w, 1e-5), norm_formula, (x, weight), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 5), (8, 384), (2, 3, 64)])
def test_rms_norm_of_a_few_rows_without_gradients_equals_its_formula(shape, dtype, tolerance):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.rand(shape[-1]).to(dtype)
    with torch.no_grad():
        y = rms_norm(x, weight, 1e-5)
    expected = norm_formula(x.double(), weight.double())
    assert y.dtype == dtype
    assert (y - expected).norm() <= tolerance * expected.norm()
    with torch.no_grad():
        assert rms_norm(torch.zeros_like(x), weight, 1e-5).eq(0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rms_norm_in_several_blocks_of_a_strided_input(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(rms_norm_kernel, "BLOCK", 100)
    x = torch.randn(32, 45).to(dtype).t()
    agree(lambda x, w: rms_norm(x, w, 1e-5), norm_formula, (x, torch.rand(32).to(dtype)), tolerance)


def test_rms_norm_is_right_for_tiny_and_large_numbers():
    for size in (1e-8, 1e4):
        x = torch.randn(8, 64) * size
        agree(lambda x, w: rms_norm(x, w, 1e-5), norm_formula, (x, torch.ones(64)), 1e-6)


def test_rms_norm_saves_its_input_and_one_number_a_row():
    x = torch.randn(100, 64, requires_grad=True)
    weight = torch.ones(64, requires_grad=True)
    assert bytes_saved(lambda x, w: rms_norm(x, w, 1e-5), x, weight) == 100 * 4


# RoPE ---------------------------------------------------------------------------------------------


def angles(sequences, length, head_dim):
    positions = torch.arange(length).expand(sequences, length) + 3 * torch.arange(sequences)[:, None]
    turns = positions[..., None] * 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return turns.cos().float(), turns.sin().float()


def rotate_pairs(x, cos, sin, interleaved):
    """Each pair as one complex number times exp(i angle): another way to write the rotation."""
    if interleaved:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    else:
        pairs = torch.complex(*x.chunk(2, -1))
    turned = pairs * torch.complex(cos.double(), sin.double())[:, :, None]
    if interleaved:
        return torch.view_as_real(turned).flatten(-2)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("shape", "channels"), [((2, 9, 3, 16), 16), ((1, 1, 1, 2), 2), ((3, 50, 4, 64), 64), ((2, 9, 3, 16), 4)]
)
def test_rope_turns_pairs_of_the_channels_that_its_tables_are_for(
    shape, channels, interleaved, dtype, tolerance, monkeypatch
):
    monkeypatch.setattr(rope_kernel, "BLOCK", 2000)
    cos, sin = angles(shape[0], shape[1], channels)

    def reference(x):
        return torch.cat((rotate_pairs(x[..., :channels], cos, sin, interleaved), x[..., channels:]), -1)

    out = agree(lambda x: apply_rope(x, cos, sin, interleaved), reference, (torch.randn(shape).to(dtype),), tolerance)
    assert out.transpose(1, 2).is_contiguous()  # as attention reads it


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [16, 8])
def test_rope_of_queries_and_keys_in_one_call(channels, interleaved, dtype, tolerance):
    cos, sin = angles(3, 1, channels)
    q, k = torch.randn(3, 1, 6, 16).to(dtype), torch.randn(3, 1, 2, 16).to(dtype)
    for decoding in (True, False):
        with torch.set_grad_enabled(not decoding):
            both = apply_rope_to_both(q, k, cos, sin, interleaved)
        for x, turned in zip((q, k), both, strict=True):
            expected = rotate_pairs(x[..., :channels].double(), cos, sin, interleaved)
            expected = torch.cat((expected, x[..., channels:].double()), -1)
            assert turned.dtype == dtype
            assert turned.shape == x.shape
            assert (turned - expected).norm() <= tolerance * expected.norm()


def test_rope_saves_nothing_but_its_tables():
    cos, sin = angles(1, 8, 16)
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    assert bytes_saved(lambda x, *_: apply_rope(x, cos, sin), x, cos, sin) == 0


# The gated activation -----------------------------------------------------------------------------

FORMULAS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x**2 * (x > 0),
}
FORMULAS |= {"swish": FORMULAS["silu"]} | dict.fromkeys(("gelu_new", "gelu_fast"), FORMULAS["gelu_pytorch_tanh"])


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
def test_swiglu_equals_its_formula(act, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(swiglu_kernel, "BLOCK", 500)
    gate, up = torch.randn(2, 37, 64).to(dtype).unbind()
    agree(lambda g, u: swiglu(g, u, act), lambda g, u: FORMULAS[act](g) * u, (gate, up), tolerance)


def test_swiglu_of_strided_inputs():
    gate, up = torch.randn(64, 74).t().chunk(2)
    agree(swiglu, lambda g, u: FORMULAS["silu"](g) * u, (gate, up), 1e-6)


def test_swiglu_in_fp32_saves_its_inputs_only():
    gate, up = (torch.randn(50, 64, requires_grad=True) for _ in range(2))
    assert bytes_saved(swiglu, gate, up) == 0
    assert bytes_saved(lambda g, u: F.silu(g) * u, gate, up) == 50 * 64 * 4  # what the plain form would keep


def test_an_unknown_activation_is_named_with_the_nearest():
    with pytest.raises(InputError, match=r"found 'silo'; did you mean 'silu'\?"):
        swiglu(torch.ones(2), torch.ones(2), "silo")
