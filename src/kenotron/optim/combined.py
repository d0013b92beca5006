"""Several optimizers over separate parameters as one optimizer, and the moving average of the weights."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kenotron.optim.state import init_state
from kenotron.parallel.shards import local_tensor


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps all of `optimizers`; it has their groups, and the state of all parameters.

    With `ema_decay` d a parameter's state also has `ema` in fp32: its value after the first step, and after every later
    one ``d * ema + (1 - d) * value``. In bf16 an average that moves by 0.1% would not change.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], ema_decay: float | None = None) -> None:
        self.optimizers, self.ema_decay = list(optimizers), ema_decay
        super().__init__([{**group} for each in self.optimizers for group in each.param_groups], {})
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for each in self.optimizers:
            self.state.update(each.state)  # some torch optimizers create state in their constructor
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the argument is for torch's helpers
        """Step every optimizer, and then the average."""
        for each in self.optimizers:
            each.step()
        if self.ema_decay is None:
            return
        new = [parameter for parameter in self._parameters() if "ema" not in self.state[parameter]]
        old = [parameter for parameter in self._parameters() if "ema" in self.state[parameter]]
        self.begin_average(new)
        if old:
            averages = [local_tensor(self.state[parameter]["ema"]) for parameter in old]
            torch._foreach_lerp_(averages, [local_tensor(parameter).float() for parameter in old], 1 - self.ema_decay)

    def init_state(self) -> None:
        """Create the state of all optimizers, as `optim.state.init_state` does."""
        for each in self.optimizers:
            init_state(each)
        if self.ema_decay is not None:
            self.begin_average(self._parameters())

    def begin_average(self, parameters: Iterable[Tensor]) -> None:
        """Set the averages of `parameters` to their values."""
        for parameter in parameters:
            self.state[parameter]["ema"] = parameter.detach().to(torch.float32, copy=True)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the parameters their averages' values within the block; before its first step, a parameter has none."""
        averages = {parameter: state["ema"] for parameter, state in self.state.items() if "ema" in state}
        before = [local_tensor(parameter).detach().clone() for parameter in averages]
        for parameter, average in averages.items():
            local_tensor(parameter).detach().copy_(local_tensor(average))
        try:
            yield
        finally:
            for parameter, weight in zip(averages, before, strict=True):
                local_tensor(parameter).detach().copy_(weight)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
