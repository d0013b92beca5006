"""AdamW on bf16 weights, with stochastic rounding of updates.

A bf16 number has eight significant bits: the next number after 1 is 1 + 2^-7. Rounding to nearest loses a step of 0.001
every time; stochastic rounding moves the weight about once in eight steps, by the right amount on average:

    1 + 0.001    to nearest  1, 1, 1, 1, 1, 1, 1, 1        stochastic  1, 1, 1, 1.0078, 1, 1, 1, 1

Weights and moments are bf16, and the update is computed in fp32. Random bits are a function of step, parameter and
element, not of the rank, so all layouts and resumed runs round alike.

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

AT_ONCE = 1 << 18  # elements that are updated at a time, with fp32 copies and 64-bit random numbers


class StochasticAdamW(OwnOptimizer):
    """AdamW (Loshchilov & Hutter, 2019), with results rounded stochastically to the dtype of the weights.

    `names` are the names of all parameters, which may be DTensors. State: `step`, `exp_avg`, `exp_avg_sq`.
    """

    defaults_of_class = {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}  # noqa: RUF012

    def __init__(self, params: Iterable[dict[str, Any]], names: dict[nn.Parameter, str], **settings: Any) -> None:
        super().__init__(params, **settings)
        self.names = names

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step; the counter is on the host, which reads it."""
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros(()), **moments}

    def update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Take one step for the parameters of a group, one by one."""
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
    """Round fp32 `value` stochastically to bf16, the nearer number more likely; `bits` has 16 random bits for each.

    If `dtype` is not bf16, nothing is rounded.
    """
    if dtype != torch.bfloat16:
        return value
    cut = value.view(torch.int32).add(bits.to(torch.int32)).bitwise_and_(-65536).view(torch.float32)
    return torch.where(value.isfinite(), cut, value)
