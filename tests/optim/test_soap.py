"""SOAP against its algorithm in float64, in a basis that is exact and in one that is followed."""

import pytest
import torch
from torch import nn

from kenotron.optim.soap import Soap


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def followed(covariance, basis):
    """One step of power iteration from the basis, its vectors in the order of their eigenvalues."""
    order = torch.diag(basis.T @ covariance @ basis).argsort(descending=True)
    return torch.linalg.qr(covariance @ basis[:, order])[0], order


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
def test_steps_follow_the_algorithm_in_float64(shape):
    """Algorithm 3 of the paper, from a state where each basis is unique; signs of eigenvectors cancel in a step."""
    lr, beta1, beta2, decay, eps, every = 0.02, 0.9, 0.8, 0.1, 1e-8, 2
    parameter = nn.Parameter(random(shape))
    settings = {"betas": (beta1, beta2), "eps": eps, "precondition_frequency": every}
    optimizer = Soap([{"params": [parameter]}], lr=lr, weight_decay=decay, **settings)
    w = parameter.detach().double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    parameter.grad = torch.zeros(shape)
    group = optimizer.param_groups[0]
    state = optimizer.state[parameter]
    state.update(optimizer.new_state(parameter, group), step=torch.ones(()))
    for side, size in zip(("left", "right"), shape, strict=True):
        state[side] = torch.cov(random((size, 3 * size), size))
        state[f"{side}_basis"] = torch.linalg.eigh(state[side])[1].flip(-1)
    left, right, ql, qr = (state[key].double() for key in ("left", "right", "left_basis", "right_basis"))
    for step in range(1, 9):
        parameter.grad = random(shape, 10 + step)
        g = parameter.grad.double()
        w = w * (1 - lr * decay)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (ql.T @ g @ qr).square()
        n = (ql.T @ m @ qr / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        w = w - lr * ql @ n @ qr.T
        left, right = beta2 * left + (1 - beta2) * g @ g.T, beta2 * right + (1 - beta2) * g.T @ g
        if step % every == 0:
            (ql, rows), (qr, columns) = followed(left, ql), followed(right, qr)
            v = v[rows][:, columns]
        optimizer.step()
    moved = (w - random(shape).double()).norm()
    assert (parameter - w).norm() / moved < 2e-4


def test_the_first_step_finds_the_eigenvectors_and_moves_nothing():
    parameter = nn.Parameter(random((6, 6)))
    parameter.grad = random((6, 6), 1)
    optimizer = Soap([{"params": [parameter]}], betas=(0.9, 0.8))
    optimizer.step()
    assert torch.equal(parameter, random((6, 6)))
    state = optimizer.state[parameter]
    for covariance, basis in (("left", "left_basis"), ("right", "right_basis")):
        rotated = state[basis].T @ state[covariance] @ state[basis]
        values = rotated.diagonal()
        torch.testing.assert_close(rotated, torch.diag(values), rtol=1e-4, atol=1e-5)
        assert (values[:-1] >= values[1:]).all()
    torch.testing.assert_close(state["left"], 0.2 * parameter.grad @ parameter.grad.T)
