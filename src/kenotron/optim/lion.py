"""Lion moves every element by the learning rate, in the direction of an interpolated momentum.

    W  <-  W (1 - lr * weight_decay) - lr * sign(beta1 M + (1 - beta1) G)
    M  <-  beta2 M + (1 - beta2) G                                              momentum of the gradient G

Its steps are larger than AdamW's at the same rate: the authors advise a third to a tenth of AdamW's rate, and a weight
decay that is larger in proportion.

Source: Chen et al., "Symbolic discovery of optimization algorithms" (arXiv 2302.06675), algorithm 2.
"""

from typing import Any

import torch
from torch import Tensor

from kenotron.optim.own import OwnOptimizer
from kenotron.parallel.shards import local_tensor


class Lion(OwnOptimizer):
    """Lion over parameters, which may be DTensors. State: `exp_avg`."""

    defaults_of_class = {"lr": 1e-4, "weight_decay": 0.0, "betas": (0.9, 0.99)}  # noqa: RUF012

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step."""
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take one step for the parameters of a group."""
        weights = [local_tensor(parameter) for parameter in parameters]
        gradients = [local_tensor(parameter.grad) for parameter in parameters]
        momenta = [local_tensor(self.state[parameter]["exp_avg"]) for parameter in parameters]
        beta1, beta2 = group["betas"]
        directions = torch._foreach_lerp(gradients, momenta, beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
