"""Optimizer state by parameter name, so that a checkpoint depends neither on groups nor on the layout.

    state_tensors(model.named_parameters(), optimizer)
    {"state.model.norm.weight.step": tensor(10.),
     "state.model.norm.weight.exp_avg": tensor([...]),
     "state.model.norm.weight.exp_avg_sq": tensor([...]), ...}

The tensors are the optimizer's own, not copies: what loads in place needs nothing else. Numbers that an optimizer keeps
beside its tensors appear as 0-dim tensors.

Hyper-parameters are not part of it. Learning rate, betas and weight decay come from the config at every start, so
an edited config is never overruled by an old checkpoint.

To resume: build the optimizer, `init_state`, fill what `state_tensors` shows, `load_numbers`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kenotron.config.errors import InputError


@torch.no_grad()
def init_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the optimizer's state without a step of training: weights, gradients and rates stay as they are.

    AdamW, SGD and our own get exactly the state that they start from. What another optimizer gets has the right names
    and shapes, to be loaded over, but its counters may have counted a step. Does nothing when there is state already.
    """
    if hasattr(optimizer, "init_state"):  # of this package
        optimizer.init_state()
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(optimizer.state.get(parameter) for parameter in parameters):
        return
    # A step at rate 0 leaves their weights alone, and a state of zeros is that before the first step.
    well_known = type(optimizer) in (torch.optim.AdamW, torch.optim.SGD)
    gradients = [parameter.grad for parameter in parameters]
    weights = [] if well_known else [parameter.detach().clone() for parameter in parameters]  # to put back
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        # Each alone, the largest first: zeros for all at once would be as much memory again as the weights.
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
    """All state of these parameters as `state.<parameter>.<key>`; a tied one under its first name."""
    return {
        f"state.{name}.{key}": _as_tensor(f"{name}.{key}", value)
        for name, parameter in named_parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_numbers(named_parameters: Named, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give the optimizer the numbers among `tensors`, which `state_tensors` has shown and a load has filled.

    The others are its own.
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
