"""Optimizer state by parameter name: exact resume, other groups, other wrappers, other order."""

import pytest
import torch
from torch import nn

from kenotron.config.errors import InputError
from kenotron.optim.build import build_optimizer
from kenotron.optim.state import init_state, load_numbers, state_tensors
from kenotron.parallel.shards import shard_of
from optim.test_build_optimizer import train
from optim.test_combined import several


class CountsInPython(torch.optim.Optimizer):
    """Keeps a Python integer, a float and a None beside its tensors, as several published optimizers do."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, mean=0.0, unused=None, average=torch.zeros_like(p))
                state["step"] += 1
                state["mean"] = 0.9 * state["mean"] + 0.1 * p.grad.mean().item()
                state["average"].lerp_(p.grad, 1.0 / state["step"])
                p.mul_(0.999)  # whatever the rate
                p.add_(state["average"], alpha=-group["lr"] * (1 + state["mean"]))


FACTORIES = [
    *({"name": "adamW"}, {"name": "adamW", "torch_adam_is_fused": False}, {"name": "sgd"}),
    *({"name": "sgd", "momentum": 0.9, "nesterov": True}, {"name": "lion"}, {"name": "muon"}, {"name": "normuon"}),
    *({"name": "soap", "soap_precondition_frequency": 2}, {"name": "torch.optim.Adagrad"}),
    *({"name": f"{__name__}.CountsInPython"}, {"name": "several"}),
]


def config_of(section, factory):
    if factory["name"] == "several":
        return several(section)
    return section(factory, weight_decay=0.0 if "Counts" in factory["name"] else 0.1)


@torch.no_grad()
def resume(model, optimizer, saved):
    """As a run does, with copies in the place of a checkpoint's files; a group of one rank holds whole tensors."""
    init_state(optimizer)
    shown = state_tensors(model.named_parameters(), optimizer)
    assert shown.keys() == saved.keys()
    for name, tensor in shown.items():
        shard_of(tensor).tensor.copy_(shard_of(saved[name]).tensor)
    load_numbers(model.named_parameters(), optimizer, shown)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f["name"] + str(len(f)))
def test_a_resumed_run_ends_with_the_same_bits(tiny, section, set_gradients, factory):
    config = config_of(section, factory)
    whole = tiny()
    train(whole, build_optimizer(whole.named_parameters(), config), set_gradients, range(7))

    first = tiny()
    optimizer = build_optimizer(first.named_parameters(), config)
    train(first, optimizer, set_gradients, range(4))
    saved = {name: tensor.clone() for name, tensor in state_tensors(first.named_parameters(), optimizer).items()}

    resumed = tiny()
    resumed.load_state_dict(first.state_dict())
    optimizer = build_optimizer(resumed.named_parameters(), config)
    resume(resumed, optimizer, saved)
    train(resumed, optimizer, set_gradients, range(4, 7))
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f["name"] + str(len(f)))
def test_empty_state_has_every_name_and_touches_nothing(tiny, section, set_gradients, factory):
    config = config_of(section, factory)
    model, trained = tiny(), tiny()
    optimizer = build_optimizer(trained.named_parameters(), config)
    train(trained, optimizer, set_gradients, range(1))
    expected = state_tensors(trained.named_parameters(), optimizer)

    optimizer = build_optimizer(model.named_parameters(), config)
    set_gradients(model.parameters(), 5)
    before = [(p.detach().clone(), p.grad) for p in model.parameters()]
    rates = [group["lr"] for group in optimizer.param_groups]
    init_state(optimizer)
    empty = state_tensors(model.named_parameters(), optimizer)
    found, wanted = ({name: (t.shape, t.dtype) for name, t in each.items()} for each in (empty, expected))
    assert found == wanted
    for p, (weight, gradient) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, weight)
        assert p.grad is gradient
    assert [group["lr"] for group in optimizer.param_groups] == rates


@pytest.mark.parametrize("factory", FACTORIES[:5], ids=lambda f: f["name"] + str(len(f)))
def test_a_run_that_starts_from_empty_state_ends_with_the_same_bits(tiny, section, set_gradients, factory):
    """A checkpoint before the first step holds the state of the first step's beginning."""
    ends = []
    for prepare in (lambda optimizer: None, init_state):
        model = tiny()
        optimizer = build_optimizer(model.named_parameters(), section(factory))
        prepare(optimizer)
        train(model, optimizer, set_gradients, range(3))
        ends.append(list(model.parameters()))
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


def test_state_does_not_depend_on_groups_and_hyperparameters_come_from_the_config(tiny, section, set_gradients):
    first, second = tiny(), tiny()
    one = build_optimizer(first.named_parameters(), section(weight_decay=0.1))
    train(first, one, set_gradients, range(3))
    rules = [{"pattern": "norm", "weight_decay": 0.0}, {"pattern": "proj", "learning_rate_scale": 0.5}]
    other = section({"name": "adamW", "adam_beta2": 0.99}, weight_decay=0.3, param_groups=rules)
    two = build_optimizer(second.named_parameters(), other)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in two.param_groups]
    resume(second, two, state_tensors(first.named_parameters(), one))
    for name, tensor in state_tensors(first.named_parameters(), one).items():
        assert torch.equal(state_tensors(second.named_parameters(), two)[name], tensor)
    assert [{k: v for k, v in group.items() if k != "params"} for group in two.param_groups] == groups
    assert {group["weight_decay"] for group in two.param_groups} == {0.0, 0.3}


def test_state_that_cannot_be_saved_is_named():
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["history"] = ["a", "list"]
    with pytest.raises(InputError, match=r"weight\.history is a list"):
        state_tensors(model.named_parameters(), optimizer)
