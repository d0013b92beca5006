"""Build optimizers of torch, other packages or users, checked so that no key is ignored and no state is lost.

An optimizer may compute something over a whole matrix, such as a norm or row means. Then it needs whole matrices,
without rows that pad the vocabulary, and is refused if they are not available. `elementwise = True` in its class
promises that it updates each element only from this element's own gradients.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError, NotSupportedYet, nearest

if TYPE_CHECKING:
    from kenotron.config.optimizer import Optimizer
NAMES_OF_ELEMENTWISE = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop SGD"
# Elementwise optimizers of torch; Adafactor and Muon are not elementwise, and Rprop fails on DTensors.
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in NAMES_OF_ELEMENTWISE.split())
OF_THE_CONFIG = {
    "params": "the model",
    "lr": "optimizer.learning_rate_scheduler.learning_rate",
    "weight_decay": "optimizer.weight_decay",
}


def build_custom(
    groups: list[dict[str, Any]], at: str, path: str, kwargs: dict[str, Any], padded: bool
) -> torch.optim.Optimizer:
    """Return the optimizer at `path` over `groups`, checked so that no key is ignored and no state is lost.

    `at` is the config key of its section, for messages.
    """
    make, kwargs = _checked(at, path, kwargs, groups[0]["lr"])
    _check_elementwise(at, make, path, groups, padded)
    optimizer = _construct(at, make, path, groups, kwargs)
    if "weight_decay" not in optimizer.defaults and any(group["weight_decay"] for group in groups):
        raise InputError(f"optimizer.weight_decay: {path} does not support weight decay; expected 0")
    return optimizer


def check_optimizer(config: Optimizer) -> None:
    """Raise `InputError` if the class of a dotted ``optimizer_factory.name`` cannot train with this config."""
    factory: Any
    for at, factory in config.factories:
        if "." in factory.name:
            _checked(at, factory.name, factory.kwargs, config.learning_rate_scheduler.learning_rate)


def _checked(
    at: str, path: str, kwargs: dict[str, Any], rate: float
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    make = load_optimizer(at, path)
    valid = [name for name in inspect.signature(make).parameters if name not in OF_THE_CONFIG]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(make).parameters.values())
    for name in kwargs:
        if name in OF_THE_CONFIG:
            raise InputError(f"{at}.kwargs.{name}: set it through {OF_THE_CONFIG[name]}")
        if name not in valid and not takes_any:
            raise InputError(f"{at}.kwargs.{name}: {path} does not take it{nearest(name, valid)}")
    if "lr" in inspect.signature(make).parameters:
        kwargs = {"lr": rate, **kwargs}
    _probe(at, make, path, kwargs)
    return make, kwargs


def _check_elementwise(
    at: str, make: type[torch.optim.Optimizer], path: str, groups: list[dict[str, Any]], padded: bool
) -> None:
    """Raise InputError if `make` may need whole matrices, and parameters are shards or padded.

    Torch's Adafactor fails on DTensors in its first step, and with a padded vocabulary the padding silently changes its
    means.
    """
    if make in ELEMENTWISE or getattr(make, "elementwise", False) is True:
        return
    meshes = [getattr(parameter, "device_mesh", None) for group in groups for parameter in group["params"]]
    if any(mesh is not None and mesh.size() > 1 for mesh in meshes):
        where = "where ranks hold shards of the weights (parallelism.tp, optimizer.zero_stage)"
    elif padded:
        where = "with rows that pad the vocabulary (model.make_vocab_size_divisible_by)"
    else:
        return
    raise InputError(
        f"{at}.name: {path} is not known to be elementwise, which it has to be {where}; expected adamW, sgd, "
        "lion, muon, normuon, soap, an elementwise optimizer of torch.optim, or a class with `elementwise = True` "
        "(docs/architecture.md)"
    )


def load_optimizer(at: str, path: str) -> type[torch.optim.Optimizer]:
    """Return the class at the dotted `path`, the name in section `at`. Raises `InputError` if there is none."""
    found = import_dotted(path, f"{at}.name")
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer):
        return found
    raise InputError(f"{at}.name: expected a torch.optim.Optimizer at '{path}', found {found!r}")


def _construct(
    at: str, make: type[torch.optim.Optimizer], path: str, params: list[Any], kwargs: dict[str, Any]
) -> torch.optim.Optimizer:
    try:
        return make(params, **kwargs)
    except (TypeError, ValueError) as error:
        raise InputError(f"{at}: {path} refuses its arguments {kwargs}: {error}") from error


def _probe(at: str, make: type[torch.optim.Optimizer], path: str, kwargs: dict[str, Any]) -> None:
    """Take two steps on one small parameter, to find problems now that would occur later.

    The trainer calls `step()` without a closure and sets `lr`; checkpoints have the state of each parameter, but no
    state in groups.
    """
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = _construct(at, make, path, [parameter], kwargs)
    if "lr" not in optimizer.defaults:
        raise InputError(f"{at}.name: {path} has no 'lr', so a schedule cannot set it")
    before = _settings(optimizer)
    for scale in (1.0, 0.5):
        parameter.grad = torch.full_like(parameter, scale)
        try:
            optimizer.step()
        except Exception as error:  # a user's class may raise anything; then it cannot train
            raise InputError(f"{at}.name: {path} cannot take a plain step(): {error}") from error
    changed = [key for key, value in _settings(optimizer).items() if before.get(key) != value]
    if changed:
        raise NotSupportedYet(
            f"{at}.name: {path} keeps state in its parameter groups ({', '.join(changed)}), "
            "which checkpoints do not hold"
        )


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {key: repr(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
