"""Lion against its formula in float64, and under the config's keys."""

import pytest
import torch
from torch import nn

from kenotron.optim.build import build_optimizer
from kenotron.optim.lion import Lion


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_step_follows_the_formula_in_float64():
    parameter = nn.Parameter(random((5, 7)))
    weight, momentum = parameter.detach().double(), torch.zeros(5, 7, dtype=torch.float64)
    optimizer = Lion([{"params": [parameter]}], lr=0.01, weight_decay=0.3, betas=(0.8, 0.95))
    for step in range(4):
        parameter.grad = random((5, 7), 10 + step)
        g = parameter.grad.double()
        weight = weight * (1 - 0.01 * 0.3) - 0.01 * torch.sign(0.8 * momentum + 0.2 * g)
        momentum = 0.95 * momentum + 0.05 * g
        optimizer.step()
    torch.testing.assert_close(parameter.double(), weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"].double(), momentum, rtol=1e-6, atol=1e-7)


def test_the_config_keys_reach_lion(tiny, section):
    config = section({"name": "Lion", "lion_beta1": 0.7, "lion_beta2": 0.9})
    optimizer = build_optimizer(tiny().named_parameters(), config)
    assert isinstance(optimizer, Lion)
    assert all(group["betas"] == (0.7, 0.9) for group in optimizer.param_groups)


def test_a_setting_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="Lion has no setting 'momentum'"):
        Lion([{"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1, momentum=0.9)
