"""A linear layer and an embedding: weights in fp32, products in the dtype of what flows through.

A weight is the fp32 master that the optimizer updates; `forward` rounds it to x's dtype where it is used, and autograd
brings its gradient back in fp32. In an fp32 run the cast does nothing; under FSDP2, which hands out
weights in the compute dtype already, neither.

Nothing here touches torch's global generator.

``torch.nn.Linear`` fills its weight from the global random stream when it is made. Ours stay empty until
:func:`kenotron.models.initialize_model` fills them by rule: weights are a function of (seed, name, element).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kenotron.kernels.products import linear


class Linear(nn.Module):
    """``y = x W^T + b``; x ``[..., in_features]``, W ``[out_features, in_features]``.

    `together`: neighbouring output features that tensor parallelism keeps on one rank; 0: those of the parent's heads.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, together: int = 0) -> None:
        super().__init__()
        self.together = together
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., in_features]`` → ``[..., out_features]``, in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)

    @staticmethod
    def grouped(x: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """Outputs of several linears for the same input; tensor-parallel ones share one collective for it."""
        return tuple(each(x) for each in linears)

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """FLOPs of one token's forward pass."""
        return 2.0 * self.weight.numel()

    def extra_repr(self) -> str:
        """Shapes, for ``print(model)``."""
        return f"{self.weight.shape[1]} → {self.weight.shape[0]}{'' if self.bias is None else ', bias'}"


class Embedding(nn.Module):
    """Row lookup: tokens ``[tokens]`` int64 → ``[tokens, hidden]``. A lookup costs no FLOPs."""

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens ``[tokens]`` int64 → ``[tokens, hidden]`` in fp32."""
        return F.embedding(tokens, self.weight)
