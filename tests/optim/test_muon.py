"""Muon against the singular value decomposition, a float64 formula, and torch's own."""

import math

import pytest
import torch
from torch import nn

from kenotron.optim import muon
from kenotron.optim.muon import COEFFICIENTS, Muon, NorMuon

SHAPES = [(32, 32), (16, 48), (48, 16)]


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def newton_schulz_in_float64(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """On the singular values themselves: the iteration never mixes singular vectors."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vt


def test_a_zero_gradient_moves_nothing():
    parameter = nn.Parameter(random((8, 8)))
    before = parameter.detach().clone()
    parameter.grad = torch.zeros_like(parameter)
    Muon([{"params": [parameter]}], lr=0.1).step()
    assert torch.equal(parameter, before)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_own_muon_takes_the_same_steps(shape, nesterov, scale):
    """Torch computes in bfloat16; one matrix, several steps, its option of the same scale."""
    ours, theirs = nn.Parameter(random(shape)), nn.Parameter(random(shape))
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 4}
    muon = Muon([{"params": [ours]}], **settings, scale=scale)
    torchs = torch.optim.Muon([theirs], **settings, adjust_lr_fn=scale)
    for step in range(4):
        for parameter, optimizer in ((ours, muon), (theirs, torchs)):
            parameter.grad = random(shape, 10 + step)
            optimizer.step()
    moved = (theirs - random(shape)).norm()
    assert (ours - theirs).norm() / moved < 2e-2


@pytest.fixture
def fast_bfloat16(monkeypatch):
    """As on a device that multiplies in bfloat16; CPUs emulate it."""
    monkeypatch.setattr(muon, "bfloat16_is_fast", lambda device: True)


DTYPES = pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])


@pytest.mark.parametrize("shape", SHAPES)
def test_unit_rms_norm_steps_have_one_effect_at_every_width(shape):
    """The root-mean-square of what a step adds to the outputs for inputs of RMS 1, at most: the rate."""
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = random(shape)
    Muon([{"params": [parameter]}], lr=0.5, scale="unit_rms_norm").step()
    rows, columns = shape
    largest = torch.linalg.matrix_norm(parameter, 2).item() * math.sqrt(columns / rows)
    assert largest == pytest.approx(0.5, rel=0.3)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_normuon_follows_the_formula_in_float64(shape, dtype, bound, fast_bfloat16):
    rows = shape[0]
    parameter = nn.Parameter(random(shape))
    weight, momentum = parameter.detach().double(), torch.zeros(shape, dtype=torch.float64)
    mean_square = torch.zeros(rows, 1, dtype=torch.float64)
    optimizer = NorMuon([{"params": [parameter]}], lr=0.05, weight_decay=0.2, momentum=0.9, beta2=0.8, dtype=dtype)
    for step in range(3):
        parameter.grad = random(shape, 20 + step)
        g = parameter.grad.double()
        momentum = 0.9 * momentum + 0.1 * g
        o = newton_schulz_in_float64(0.9 * momentum + 0.1 * g, 5)
        mean_square = 0.8 * mean_square + 0.2 * o.square().mean(1, keepdim=True)
        divided = o / mean_square.sqrt()
        weight = weight * (1 - 0.05 * 0.2) - 0.05 * 0.2 * math.sqrt(max(shape)) * divided * (o.norm() / divided.norm())
        optimizer.step()
    assert (parameter - weight).norm() / (weight - random(shape).double()).norm() < bound
    assert optimizer.state[parameter]["row_mean_square"].shape == (rows, 1)


@pytest.mark.parametrize("make", [Muon, NorMuon])
def test_the_weights_of_experts_are_a_matrix_each(make):
    together = nn.Parameter(torch.stack([random((16, 48), seed) for seed in range(3)]))
    apart = [nn.Parameter(random((16, 48), seed)) for seed in range(3)]
    one, many = make([{"params": [together]}], lr=0.1), make([{"params": apart}], lr=0.1)
    for step in range(3):
        together.grad = random((3, 16, 48), 30 + step)
        for expert, parameter in enumerate(apart):
            parameter.grad = together.grad[expert].clone()
        one.step()
        many.step()
    torch.testing.assert_close(together, torch.stack(apart), rtol=1e-2, atol=1e-4)


def test_only_matrices_are_accepted():
    with pytest.raises(ValueError, match="expected matrices"):
        Muon([{"params": [nn.Parameter(torch.zeros(4))]}])


@pytest.mark.parametrize(("device", "together"), [("cpu", [1] * 20), ("meta", [16, 4])])
def test_matrices_of_one_shape_are_products_of_one_launch_on_a_gpu(device, together):
    class Counted(Muon):
        def update_batch(self, batch, group):
            found.append(len(batch.parameters))

    found = []
    parameters = [nn.Parameter(torch.empty(2048, 2048, device=device)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = parameter.detach()
    Counted([{"params": parameters}]).step()
    assert found == together
