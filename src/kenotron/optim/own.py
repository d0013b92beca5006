"""What the optimizers of this package have in common: state that is made, not stepped into being."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor


class OwnOptimizer(torch.optim.Optimizer):
    """A subclass says what state a parameter begins with, and updates those of a group that have a gradient.

    `params` are group dictionaries, as `parameter_groups` makes them; `settings` are for those that do not override
    them. Raises TypeError for one that is none of the class's.
    """

    defaults_of_class: ClassVar[Mapping[str, Any]] = {}
    """Every setting, and its value where none is given."""

    def __init__(self, params: Iterable[dict[str, Any]], **settings: Any) -> None:
        if unknown := sorted(settings.keys() - self.defaults_of_class.keys()):
            raise TypeError(f"{type(self).__name__} has no setting {unknown[0]!r}")
        super().__init__(params, {**self.defaults_of_class, **settings})

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of `parameters`, which have gradients and state; at least one."""
        raise NotImplementedError

    def init_state(self) -> None:
        """Makes the state of every parameter that has none."""
        for group in self.param_groups:
            self._make_state(group["params"], group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the argument is for torch's helpers
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._make_state(parameters, group)
            if parameters:
                self.update(parameters, group)

    def _make_state(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.new_state(parameter, group)
