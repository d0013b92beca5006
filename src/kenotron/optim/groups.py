"""Parameter groups, with the learning rate, weight decay and update rule of each parameter.

The config's `param_groups` is a list of patterns; for each parameter the first pattern that matches its
name wins:

    optimizer:
      weight_decay: 0.1
      weight_decay_exclude_named_params: ['.*norm\\.weight']
      param_groups:
        - {pattern: 'model\\.embed_tokens', learning_rate_scale: 0.1}
        - {pattern: 'mlp', optimizer_factory: {name: lion}}

    model.embed_tokens.weight                   rate * 0.1   weight decay 0.1
    model.layers.0.self_attn.q_proj.weight      rate         weight decay 0.1
    model.layers.0.input_layernorm.weight       rate         weight decay 0

All patterns are regular expressions for the parameter's own name: patterns of `param_groups` match anywhere
(`re.search`), patterns of the exclusion at its start (`re.match`, nanotron's rule). A parameter excluded from weight
decay has none, even if its group has one.

Groups are uniform in mesh as well: plain tensors and DTensors of different meshes are never in one group, because fused
and foreach kernels need a list of one kind. Parameters are in the model's order, groups in the order of their first
parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kenotron.config.errors import InputError, nearest
from kenotron.config.optimizer import AdamW
from kenotron.optim.schedule import learning_rate

if TYPE_CHECKING:
    from kenotron.config.optimizer import LearningRateScheduler, Optimizer
    from kenotron.models.parametrization import Factors


OF_MATRICES = ("muon", "normuon", "soap")


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    optimizer_config: Optimizer,
    all_names: Sequence[str] | None = None,
    factors: Mapping[str, Factors] | None = None,
) -> list[dict[str, Any]]:
    """Split the trainable parameters into groups that are uniform in settings and mesh.

    Patterns are checked against `all_names`, the whole model's names if this rank has a part of it (pp); None: the
    parameters' names.

    `factors` of the parametrization multiply a parameter's rate, weight decay and epsilon, also those set by a pattern.

    Each group is `{"params", "lr", "learning_rate_scale", "weight_decay", "factory"}`; with `factors` also `"eps"`, and
    with its own schedule also `"schedule"`. `"factory"` is the section of its update rule: if the config has an
    optimizer of matrices, AdamW's for other parameters. `named_parameters` has a tied parameter once.

    Raises `InputError` for a pattern that has no effect, or that assigns other parameters to an optimizer of matrices.
    """
    parameters = list(named_parameters)
    names = [name for name, _ in parameters] if all_names is None else all_names
    _check_patterns([rule.pattern for rule in optimizer_config.param_groups or ()], names)
    excluded = _excluded(optimizer_config.weight_decay_exclude_named_params or [], names)

    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        rule = optimizer_config.group_of(name)
        scale, schedule = rule.learning_rate_scale, rule.learning_rate_scheduler
        # Sections are identified by their names.
        factory: Any = rule.optimizer_factory or optimizer_config.optimizer_factory
        if rule.optimizer_factory and factory.name in OF_MATRICES and not is_hidden_matrix(name, parameter):
            raise InputError(
                f"optimizer.param_groups: '{rule.pattern}' gives {name} to {factory.name}, which is for hidden "
                "matrices alone"
            )
        weight_decay = optimizer_config.weight_decay if rule.weight_decay is None else rule.weight_decay
        if name in excluded:
            weight_decay = 0.0
        if factors:
            scale *= factors[name].learning_rate
            weight_decay *= factors[name].weight_decay
        eps = factory.adam_eps * factors[name].epsilon if factors else None
        if factory.name in OF_MATRICES and not is_hidden_matrix(name, parameter):
            factory = AdamW(**{key: getattr(factory, key) for key in AdamW.model_fields if key != "name"})
        scale *= getattr(factory, "muon_learning_rate_scale", 1.0)
        options = {"learning_rate_scale": scale, "weight_decay": weight_decay, "eps": eps, "schedule": schedule}
        settings = {key: value for key, value in options.items() if value is not None} | {"factory": factory}
        mesh = getattr(parameter, "device_mesh", None)
        key = (*(repr(value) for value in settings.values()), mesh)
        group = groups.setdefault(key, {"params": [], **settings})
        group["params"].append(parameter)

    if not groups:
        raise InputError("optimizer: the model has no trainable parameter")
    result = list(groups.values())
    for group in result:
        schedule = group.get("schedule") or optimizer_config.learning_rate_scheduler
        group["lr"] = schedule.learning_rate * group["learning_rate_scale"]
    return result


def set_learning_rates(
    optimizer: torch.optim.Optimizer, schedule: LearningRateScheduler, step: int, train_steps: int
) -> float:
    """Give every group the rate of `step` by its own schedule or `schedule`, times its `learning_rate_scale`.

    Returns the rate of `schedule`.
    """
    rate = learning_rate(schedule, step, train_steps)
    for group in optimizer.param_groups:
        own = learning_rate(group["schedule"], step, train_steps) if "schedule" in group else rate
        group["lr"] = own * group.get("learning_rate_scale", 1.0)
    return rate


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Return whether this parameter is the weight of a linear map in a numbered layer, for which Muon is meant.

    `model.layers.3.mlp.up_proj.weight` is one, and `model.layers.3.mlp.experts.up_proj.weight` is one per expert;
    embeddings (`model.layers.3.self_attn.value_embedding.weight`, too), the output head, norms and biases are not.
    """
    *path, leaf = name.split(".")
    in_a_layer = any(part.isdigit() for part in path)
    matrices = parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in path)
    return matrices and leaf == "weight" and in_a_layer and not path[-1].endswith("embedding")


def _check_patterns(patterns: list[str], names: Sequence[str]) -> None:
    """Raise InputError for a pattern that is the first match of no name."""
    key = "optimizer.param_groups"
    taken: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if re.search(pattern, name)}
        if not found:
            raise InputError(f"{key}: '{pattern}' matches no parameter's name{_nearest(pattern, names)}")
        if found <= taken:
            raise InputError(
                f"{key}: '{pattern}' has no effect: earlier patterns match all that it matches, and the first match "
                "wins"
            )
        taken |= found


def _excluded(patterns: list[str], names: Sequence[str]) -> set[str]:
    """Return the names that a pattern matches at their start."""
    key = "optimizer.weight_decay_exclude_named_params"
    excluded: set[str] = set()
    for pattern in patterns:
        found = {name for name in names if re.match(pattern, name)}
        if not found:
            elsewhere = any(re.search(pattern, name) for name in names)
            hint = f"; did you mean '.*{pattern}'?" if elsewhere else _nearest(pattern, names)
            raise InputError(f"{key}: '{pattern}' matches no parameter's name from its start{hint}")
        excluded |= found
    return excluded


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Return the name, or the end or part of a name, nearest to the pattern without special characters."""
    plain = pattern.replace("\\", "").replace(".*", "").strip("^$")
    ends = [name.split(".", i)[-1] for name in names for i in range(name.count(".") + 1)]
    parts = [part for name in names for part in name.split(".")]
    return nearest(plain, [*names, *ends, *parts])
