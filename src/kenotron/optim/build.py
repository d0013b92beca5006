"""Makes the optimizer that the config names.

    optimizer_factory: {name: adamW, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-8}
    optimizer_factory: {name: sgd, momentum: 0.9, nesterov: true}
    optimizer_factory: {name: muon}                                      hidden matrices; AdamW for the rest
    optimizer_factory: {name: torch.optim.Adagrad, kwargs: {eps: 1.0e-10}}

Whatever it is, it is one `torch.optim.Optimizer` over the groups of `parameter_groups`; the trainer sets
its learning rate before every step (`set_learning_rate`) and saves its state by parameter name
(`state_tensors`).

Fused kernels make one pass over memory instead of a dozen. AdamW on 17M parameters, fp32, one thread: fused
19 ms, for-loop 67 ms, foreach 76 ms; plain tensors and DTensors on a mesh of one differ by 1 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.optim.groups import parameter_groups
from kenotron.optim.schedule import check_schedule

if TYPE_CHECKING:
    from kenotron.config.optimizer import Optimizer
    from kenotron.models.parametrization import Factors
FACTORY = "optimizer.optimizer_factory"
# Imported where a config asks for them.
MUON = "kenotron.optim.muon.MuonWithAdamW"
ROUNDING = "kenotron.optim.stochastic_rounding.StochasticAdamW"
CUSTOM = "kenotron.optim.custom.build_custom"


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    optimizer_config: Optimizer,
    *,
    all_names: Sequence[str] | None = None,
    padded: bool = False,
    factors: Mapping[str, Factors] | None = None,
) -> torch.optim.Optimizer:
    """The optimizer of `config.optimizer` over the model's (name, parameter) pairs.

    `all_names` are those of the whole model, of which this rank may have a part; `padded`: some parameters have rows
    that pad the vocabulary; `factors`: of the parametrization, by name. Raises `InputError` for a pattern without
    parameters, for a dotted path that is not an optimizer, does not take the keyword arguments of the config or needs
    whole matrices where there are none, and for a schedule's path that is not a function.
    """
    check_schedule(optimizer_config.learning_rate_scheduler)
    named_parameters = list(named_parameters)
    groups = parameter_groups(named_parameters, optimizer_config, all_names, factors)
    optimizer: torch.optim.Optimizer
    factory: Any = optimizer_config.optimizer_factory  # one of several sections, which differ in name
    if optimizer_config.stochastic_rounding:
        optimizer = import_dotted(ROUNDING, f"{FACTORY}.name")(
            groups,
            {parameter: name for name, parameter in named_parameters},
            betas=(factory.adam_beta1, factory.adam_beta2),
            eps=factory.adam_eps,
        )
        return optimizer
    if factory.name == "adamW":
        return torch.optim.AdamW(
            groups,
            betas=(factory.adam_beta1, factory.adam_beta2),
            eps=factory.adam_eps,
            fused=factory.torch_adam_is_fused,
        )
    if factory.name == "sgd":
        if factory.nesterov and not factory.momentum:
            raise InputError(f"{FACTORY}.nesterov: needs a momentum above 0, found {factory.momentum}")
        # Not fused: torch 2.13 has no fused SGD for DTensors.
        return torch.optim.SGD(groups, momentum=factory.momentum, nesterov=factory.nesterov)
    if factory.name == "muon":
        optimizer = import_dotted(MUON, f"{FACTORY}.name")(
            groups,
            momentum=factory.muon_momentum,
            nesterov=factory.muon_nesterov,
            ns_steps=factory.muon_ns_steps,
            betas=(factory.adam_beta1, factory.adam_beta2),
            eps=factory.adam_eps,
            fused=factory.torch_adam_is_fused,
        )
        return optimizer
    optimizer = import_dotted(CUSTOM, f"{FACTORY}.name")(groups, factory.name, factory.kwargs, padded)
    return optimizer
