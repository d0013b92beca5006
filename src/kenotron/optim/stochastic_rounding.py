"""AdamW on bf16 weights, with updates that are rounded up or down at random, in proportion.

A bf16 number has eight significant bits: the next one after 1 is 1 + 2^-7. To the nearest, a step of 0.001 is lost each
time; rounded at random, it moves the weight once in eight steps, and by the right amount on average:

    1 + 0.001    to the nearest  1, 1, 1, 1, 1, 1, 1, 1        at random  1, 1, 1, 1.0078, 1, 1, 1, 1

Weights and moments are bf16, the update is computed in fp32. Random bits are a function of step, parameter and element,
never of the rank, so any layout rounds alike, and so does a run that goes on from a checkpoint.

Source: Gupta et al., "Deep learning with limited numerical precision" (arXiv 1502.02551).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kenotron.kernels.hashing import derive_key
from kenotron.kernels.random import hash_counters
from kenotron.optim.own import OwnOptimizer
from kenotron.parallel.shards import local_tensor, shard_of

AT_ONCE = 1 << 18  # elements, for which fp32 copies and 64-bit numbers of each are made


class StochasticAdamW(OwnOptimizer):
    """AdamW (Loshchilov & Hutter, 2019), its results rounded stochastically to the dtype of the weights.

    `names` are those of all parameters, which may be DTensors. State: `step`, `exp_avg`, `exp_avg_sq`.
    """

    defaults_of_class = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}  # noqa: RUF012

    def __init__(self, params: Iterable[dict[str, Any]], names: dict[nn.Parameter, str], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.names = names

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state of a parameter before its first step; the counter is on the host, which reads it."""
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **moments}

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of the parameters of a group, one by one."""
        for parameter in parameters:
            self._update(parameter, group)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        step, (beta1, beta2), rate = int(state["step"]), group["betas"], group["lr"]
        shard = shard_of(parameter.detach())
        key = derive_key("stochastic rounding", step, self.names[parameter])
        tensors = (parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        for block in shard.parts(AT_ONCE):
            kept = [shard.tensor[block], *(local_tensor(each)[block] for each in tensors[1:])]
            weight, mean, square = (each.float() for each in kept)
            gradient = local_tensor(tensors[0])[block].float()
            mean.lerp_(gradient, 1 - beta1)
            square.lerp_(gradient.square(), 1 - beta2)
            size = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            weight.mul_(1 - rate * group["weight_decay"]).addcdiv_(mean, size, value=-rate / (1 - beta1**step))
            bits = hash_counters(key, shard.numbers(block, shard.tensor.device))
            for number, (into, value) in enumerate(zip(kept, (weight, mean, square), strict=True)):
                into.copy_(rounded(value, (bits >> 16 * number).bitwise_and_(0xFFFF), into.dtype))


def rounded(value: Tensor, bits: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 `value` as a number of bf16 below or above it, the nearer the likelier; `bits`: 16 random ones for each.

    Of another `dtype` than bf16 nothing is rounded.
    """
    if dtype != torch.bfloat16:
        return value
    cut = value.view(torch.int32).add(bits.to(torch.int32)).bitwise_and_(-65536).view(torch.float32)
    return torch.where(value.isfinite(), cut, value)
