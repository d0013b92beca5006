"""Several optimizers over parameters of their own, which train as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps all of `optimizers`; its groups are theirs, and it holds the state of all parameters."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([{**group} for each in self.optimizers for group in each.param_groups], {})
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for each in self.optimizers:
            self.state.update(each.state)  # some optimizers of torch make theirs at once
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the argument is for torch's helpers
        """One step of each."""
        for each in self.optimizers:
            each.step()
