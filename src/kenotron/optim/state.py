"""Optimizer state by parameter name, so that a checkpoint does not depend on groups or layout.

    state_tensors(model.named_parameters(), optimizer)
    {"state.model.norm.weight.step": tensor(10.),
     "state.model.norm.weight.exp_avg": tensor([...]),
     "state.model.norm.weight.exp_avg_sq": tensor([...]), ...}

The tensors are the optimizer's own, not copies, so they can be loaded in place. Python numbers in an optimizer's state
appear as 0-dim tensors.

Hyper-parameters are not included. Learning rate, betas and weight decay come from the config at every start, so an old
checkpoint never overrides an edited config.

To resume: build the optimizer, call `init_state`, fill the tensors of `state_tensors`, and call `load_numbers`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kenotron.config.errors import InputError


@torch.no_grad()
def init_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the optimizer's state without a step of training: weights, gradients and rates stay unchanged.

    AdamW, SGD and Kénotron's own get exactly their initial state. Other optimizers get state with the right names and
    shapes, to be overwritten by a load, whose counters may have counted a step. Does nothing if there is state already.
    """
    if hasattr(optimizer, "init_state"):  # one of this package
        optimizer.init_state()
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(optimizer.state.get(parameter) for parameter in parameters):
        return
    # A step at rate 0 does not change their weights, and zeros are their state before the first step.
    well_known = type(optimizer) in (torch.optim.AdamW, torch.optim.SGD)
    gradients = [parameter.grad for parameter in parameters]
    weights = [] if well_known else [parameter.detach().clone() for parameter in parameters]  # to restore
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        # One parameter at a time, largest first: zero gradients for all would need as much memory as the weights.
        largest_first = sorted(parameters, key=torch.numel, reverse=True)
        for some in ([each] for each in largest_first) if well_known else [parameters]:
            for parameter in some:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter in some:
                parameter.grad = None
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for parameter, weight in zip(parameters, weights, strict=False):
            parameter.copy_(weight)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    if well_known:
        for parameter in parameters:
            for value in optimizer.state.get(parameter, {}).values():
                value.zero_()


Named = Iterable[tuple[str, nn.Parameter]]


def state_tensors(named_parameters: Named, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all state of these parameters as `state.<parameter>.<key>`; tied ones under their first name."""
    return {
        f"state.{name}.{key}": _as_tensor(f"{name}.{key}", value)
        for name, parameter in named_parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_numbers(named_parameters: Named, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Write the Python numbers among `tensors`, which `state_tensors` returned and a load has filled, back.

    All other tensors are the optimizer's own.
    """
    for name, parameter in named_parameters:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if value is not None and not isinstance(value, Tensor):
                state[key] = type(value)(tensors[f"state.{name}.{key}"].item())


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int):
        return torch.tensor(value)
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    raise InputError(f"optimizer state: {name} is a {type(value).__name__}, and only tensors and numbers can be saved")
