"""A linear layer and an embedding with fp32 weights, whose products are computed in the dtype of the input.

A weight is the fp32 master that the optimizer updates; `forward` rounds it to x's dtype, and autograd returns its
gradient in fp32. The cast does nothing in an fp32 run, or under FSDP2, which gathers weights in the compute dtype.

``torch.nn.Linear`` fills its weight from torch's global generator when it is built. These weights stay empty until
:func:`kenotron.models.initialize_model` fills them as a function of (seed, name, element).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels.products import ALONE, Linears, adds_inside, linear


class Linear(nn.Module):
    """``y = x W^T + b``; x ``[..., in_features]``, W ``[out_features, in_features]``.

    `together`: the number of adjacent output features that tensor parallelism keeps on one rank; 0: the parent's
    head_dim.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, together: int = 0) -> None:
        super().__init__()
        self.together = together
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]`` for x ``[..., in_features]``, in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)

    @staticmethod
    def grouped(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """Return the outputs of several linears for one input; tensor-parallel linears share one collective for it."""
        if adds_inside(x) and all(map(_is_plain, linears)):
            return Linears.apply(x, ALONE, *(each.weight for each in linears), *(each.bias for each in linears))
        return tuple(each(x) for each in linears)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return the FLOPs of one token's forward pass."""
        return 2.0 * self.weight.numel()

    def extra_repr(self) -> str:
        """Return the shapes, for ``print(model)``."""
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}{'' if self.bias is None else ', bias'}"


def _is_plain(module: nn.Module) -> bool:
    """Return whether a call of `module` computes what `Linear.forward` does, and nothing more."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return type(module).forward is Linear.forward and not any(hooks)


class Embedding(nn.Module):
    """Row lookup: tokens ``[tokens]`` int64 → ``[tokens, hidden]``. A lookup costs no FLOPs."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[tokens, hidden]`` in fp32 for tokens ``[tokens]`` int64."""
        return F.embedding(tokens, self.weight)
