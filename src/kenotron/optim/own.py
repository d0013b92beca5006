"""The base of this package's optimizers, whose state can be created without a step."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor


class OwnOptimizer(torch.optim.Optimizer):
    """The base class: a subclass defines a parameter's initial state, and updates parameters with gradients.

    `params` are group dictionaries, as `parameter_groups` returns them; `settings` are the defaults of groups. Raises
    TypeError for a setting that the class does not have.
    """

    defaults_of_class: ClassVar[Mapping[str, Any]] = {}
    """All settings, with their default values."""

    def __init__(self, params: Iterable[dict[str, Any]], **settings: Any) -> None:
        if unknown := sorted(settings.keys() - self.defaults_of_class.keys()):
            raise TypeError(f"{type(self).__name__} has no setting {unknown[0]!r}")
        super().__init__(params, {**self.defaults_of_class, **settings})

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        raise NotImplementedError

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take one step for `parameters` (at least one), which have gradients and state."""
        raise NotImplementedError

    def init_state(self) -> None:
        """Create the state of every parameter that has none."""
        for group in self.param_groups:
            self._make_state(group["params"], group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the argument is for torch's helpers
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._make_state(parameters, group)
            if parameters:
                self.update(parameters, group)

    def _make_state(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self.new_state(parameter, group)
