"""The optimizer that the config names, against float64 formulas and torch."""

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.config.optimizer import LearningRateScheduler
from kenotron.optim.build import build_optimizer
from kenotron.optim.custom import ELEMENTWISE
from kenotron.optim.groups import set_learning_rates
from kenotron.optim.lion import Lion
from kenotron.optim.muon import Muon, NorMuon
from kenotron.optim.soap import Soap
from kenotron.optim.stochastic_rounding import StochasticAdamW


def train(model, optimizer, set_gradients, steps=range(5)):
    """The weights after `steps` of this optimizer."""
    for step in steps:
        set_gradients(model.parameters(), step)
        rate = LearningRateScheduler(learning_rate=1e-2 / (1 + step), lr_decay_style="constant")
        set_learning_rates(optimizer, rate, 1, 1)
        optimizer.step()
    return list(model.parameters())


def adamw_in_float64(model, set_gradients, decay_of, steps=5, beta1=0.9, beta2=0.95, eps=1e-8):
    """Loshchilov & Hutter, algorithm 2, as it stands in the paper."""
    weights = [p.detach().double() for p in model.parameters()]
    m = [torch.zeros_like(w) for w in weights]
    v = [torch.zeros_like(w) for w in weights]
    for step in range(steps):
        set_gradients(model.parameters(), step)
        rate, t = 1e-2 / (1 + step), step + 1
        for i, (name, p) in enumerate(model.named_parameters()):
            g = p.grad.double()
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            update = (m[i] / (1 - beta1**t)) / ((v[i] / (1 - beta2**t)).sqrt() + eps)
            weights[i] = weights[i] - rate * decay_of(name) * weights[i] - rate * update
    return weights


@pytest.mark.parametrize(("fused", "stochastic"), [(True, False), (False, False), (True, True)])
def test_adamw_is_the_papers_with_decay_only_where_it_should_be(tiny, section, set_gradients, fused, stochastic):
    keys = {"weight_decay_exclude_named_params": [".*norm"], "stochastic_rounding": stochastic}  # in fp32, of no effect
    config = section({"name": "adamW", "torch_adam_is_fused": fused}, **keys)
    model = tiny()
    optimizer = build_optimizer(model.named_parameters(), config)
    assert isinstance(optimizer, StochasticAdamW) if stochastic else optimizer.defaults["fused"] is fused
    expected = adamw_in_float64(tiny(), set_gradients, lambda name: 0.0 if "norm" in name else 0.1)
    for ours, formula in zip(train(model, optimizer, set_gradients), expected, strict=True):
        torch.testing.assert_close(ours.double(), formula, rtol=2e-6, atol=2e-7)


SGD = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("factory", "theirs"),
    [
        ({"name": "sgd", "momentum": 0.9, "nesterov": True}, partial(SGD, nesterov=True)),
        ({"name": "sgd", "momentum": 0.9}, SGD),
        ({"name": "torch.optim.Adagrad", "kwargs": {"eps": 1e-6}}, partial(torch.optim.Adagrad, eps=1e-6)),
    ],
)
def test_an_optimizer_of_torch_equals_itself(tiny, section, set_gradients, factory, theirs):
    config = section(factory, weight_decay=0.02)
    model, other = tiny(), tiny()
    ours = train(model, build_optimizer(model.named_parameters(), config), set_gradients)
    expected = train(other, theirs(other.parameters(), lr=1e-2, weight_decay=0.02), set_gradients)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


class CountsInItsGroups(torch.optim.Optimizer):
    """Like schedule-free optimizers: the step count is a group's, not a parameter's."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "k": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1


class WithoutDecay(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ({"name": "torch.optim.Adagradd"}, "has no 'Adagradd'; did you mean 'Adagrad'"),
        ({"name": "torch.optimm.Adagrad"}, "cannot import 'torch.optimm'"),
        ({"name": "torch.nn.Linear"}, "expected a torch.optim.Optimizer at 'torch.nn.Linear'"),
        ({"name": "torch.optim.Adagrad", "kwargs": {"epss": 1.0}}, "does not take it; did you mean 'eps'"),
        ({"name": "torch.optim.Adagrad", "kwargs": {"lr": 1.0}}, "set it through optimizer.learning_rate_sch"),
        ({"name": "torch.optim.Adagrad", "kwargs": {"eps": -1.0}}, "refuses its arguments"),
        ({"name": "torch.optim.LBFGS"}, "cannot take a plain step"),
        ({"name": "torch.optim.SparseAdam"}, "cannot take a plain step"),
        ({"name": "sgd", "nesterov": True}, r"nesterov: needs a momentum above 0, found 0\.0"),
    ],
)
def test_a_wrong_optimizer_is_one_clear_line(tiny, section, factory, message):
    with pytest.raises(InputError, match=message) as caught:
        build_optimizer(tiny().named_parameters(), section(factory))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ({"name": "RMSprop", "kwargs": {"alpa": 0.9}}, r"kwargs\.alpa: "),
        ({"name": "torch.optim.Nothing"}, r"name: "),
        ({"name": "sgd", "nesterov": True}, r"nesterov: needs a"),
    ],
)
def test_an_error_of_a_group_names_the_group(tiny, section, factory, message):
    groups = [{"pattern": "norm"}, {"pattern": "weight", "optimizer_factory": factory}]
    with pytest.raises(InputError, match=rf"^optimizer\.param_groups\.1\.optimizer_factory\.{message}"):
        build_optimizer(tiny().named_parameters(), section({"name": "adamW"}, param_groups=groups))


def test_state_that_no_checkpoint_would_hold_is_refused_at_the_start(tiny, section):
    name = f"{__name__}.CountsInItsGroups"
    with pytest.raises(NotSupportedYet, match=r"keeps state in its parameter groups \(k\)"):
        build_optimizer(tiny().named_parameters(), section({"name": name}))


def test_weight_decay_that_an_optimizer_does_not_have_is_not_ignored(tiny, section):
    name = f"{__name__}.WithoutDecay"
    with pytest.raises(InputError, match="does not support weight decay; expected 0"):
        build_optimizer(tiny().named_parameters(), section({"name": name}))
    config = section({"name": name}, weight_decay=0.0)
    assert isinstance(build_optimizer(tiny().named_parameters(), config), WithoutDecay)


class Elementwise(WithoutDecay):
    elementwise = True


def sharded_over_two(model):
    """Its parameters, the second of which says that it is a shard."""
    parameters = list(model.named_parameters())
    parameters[1][1].device_mesh = Mock(size=lambda: 2)
    return parameters


@pytest.mark.parametrize("name", ["torch.optim.Adafactor", f"{__name__}.WithoutDecay"])
def test_an_optimizer_that_may_need_whole_matrices_is_refused_without_them(tiny, section, name):
    config = section({"name": name}, weight_decay=0.0)
    said = rf"{name} is not known to be elem.* "
    with pytest.raises(InputError, match=said + "where ranks hold shards .*expected adamW, sgd"):
        build_optimizer(sharded_over_two(tiny()), config)
    with pytest.raises(InputError, match=said + r"rows that pad the vocabulary \(model\.make_vocab_size_divis"):
        build_optimizer(tiny().named_parameters(), config, padded=True)
    build_optimizer(tiny().named_parameters(), config)


@pytest.mark.parametrize("name", [f"{__name__}.Elementwise", "torch.optim.RMSprop"])
def test_an_elementwise_optimizer_is_accepted_everywhere(tiny, section, name):
    config = section({"name": name}, weight_decay=0.0)
    build_optimizer(sharded_over_two(tiny()), config, padded=True)


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_what_torch_has_of_elementwise_optimizers_is_elementwise(make):
    """A matrix steps as its parts do, each a parameter of its own; and Adafactor, which is none, does not."""

    def stepped(make, size):
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(6, 4, generator=generator)
        gradients = [torch.randn(6, 4, generator=generator) for _ in range(3)]
        parts = [nn.Parameter(part.clone()) for rows in whole.split(size) for part in rows.split(size, 1)]
        optimizer = make(parts, lr=0.01)
        for gradient in gradients:
            pieces = [part for rows in gradient.split(size) for part in rows.split(size, 1)]
            for part, piece in zip(parts, pieces, strict=True):
                part.grad = piece.clone()
            optimizer.step()
        columns = math.ceil(4 / size)
        rows = [torch.cat(parts[i : i + columns], 1) for i in range(0, len(parts), columns)]
        return torch.cat(rows).detach()

    torch.testing.assert_close(stepped(make, 2), stepped(make, 8), rtol=1e-6, atol=1e-7)
    difference = stepped(torch.optim.Adafactor, 2) - stepped(torch.optim.Adafactor, 8)
    assert difference.abs().max() > 1e-5


MUONS = {"muon_momentum": 0.8, "muon_nesterov": False, "muon_ns_steps": 3, "muon_learning_rate_scale": 2.0}
ADAMS = {"adam_beta1": 0.6, "adam_beta2": 0.9, "adam_eps": 1e-7, "torch_adam_is_fused": False}
OF_MUON = {"momentum": 0.8, "nesterov": False, "ns_steps": 3, "learning_rate_scale": 2.0}


@pytest.mark.parametrize(
    ("factory", "kind", "own"),
    [
        ({"name": "muon", "muon_scale": "original"} | MUONS, Muon, OF_MUON | {"scale": "original"}),
        (
            {"name": "normuon", "muon_scale": "unit_rms_norm", "normuon_beta2": 0.7} | MUONS,
            NorMuon,
            OF_MUON | {"scale": "unit_rms_norm", "beta2": 0.7},
        ),
        (
            {"name": "soap", "soap_beta1": 0.7, "soap_beta2": 0.8, "soap_precondition_frequency": 3},
            Soap,
            {"betas": (0.7, 0.8), "precondition_frequency": 3, "eps": 1e-7},
        ),
    ],
)
def test_the_config_keys_reach_an_optimizer_of_matrices_and_its_adamw(tiny, section, factory, kind, own):
    optimizer = build_optimizer(tiny().named_parameters(), section(factory | ADAMS))
    matrices, *others = sorted(optimizer.param_groups, key=lambda group: not own.keys() <= group.keys())
    assert {key: matrices[key] for key in own} == own
    assert {(group["betas"], group["eps"], group["fused"]) for group in others} == {((0.6, 0.9), 1e-7, False)}


# ---- Lion ----


def random(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_step_of_lion_follows_its_formula_in_float64():
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


def test_a_setting_that_lion_has_not_is_refused() -> None:
    with pytest.raises(TypeError, match="Lion has no setting 'momentum'"):
        Lion([{"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1, momentum=0.9)
