"""Muon and NorMuon, which move matrices by their orthogonalized momentum.

The momentum of a weight matrix is usually near low rank: a few directions take the whole step. Muon keeps
its singular vectors and sets the singular values near 1, so that every direction moves:

    momentum  M = U diag(10, 1, 0.1) V^T        step  O = U diag(~1, ~1, ~1) V^T

Five Newton-Schulz iterations do this only with matrix products. Each maps every singular value s to a s +
b s^3 + c s^5; (a, b, c) rise so steeply at 0 that small values come up fast, and settle between about 0.7
and 1.2.

    M  <-  mu M + (1 - mu) G                      momentum of the gradient G
    O  <-  NewtonSchulz(mu M + (1 - mu) G)        with Nesterov, otherwise NewtonSchulz(M)
    W  <-  W (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(rows, columns)) * O

A matrix with orthonormal rows or columns has root-mean-square 1 / sqrt(max(rows, columns)), so the factor
gives each step an RMS of about 0.2, like AdamW's steps. Learning rate and weight decay tuned for AdamW
can be reused, with one schedule for both. Two other factors are in use (`SCALES`).

The rows of O differ in size, and rows of some neurons stay small. NorMuon divides each row by the root of its mean
square over time, and rescales O to its previous norm:

    v  <-  beta2 v + (1 - beta2) mean over columns of O^2          O'  =  O / sqrt(v), times |O| / |O / sqrt(v)|

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), for the iteration
and its coefficients; Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982), for the factor and
the weight decay; Li et al., "NorMuon" (arXiv 2510.05491), with the norm as in their code.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kenotron.kernels.bfloat16 import bfloat16_is_fast
from kenotron.optim.matrices import Batch, MatrixOptimizer, zeros_beside
from kenotron.parallel.shards import local_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7  # lower bound of the norm, for an all-zero momentum
ROW_EPSILON = 1e-10  # added to the root of a row's mean square
SCALES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
}


class Muon(MatrixOptimizer):
    """Muon over matrices. State: `momentum_buffer`. `scale` is a key of `SCALES`, `dtype` the iteration's dtype.

    In fp32, updates on two layouts differ by fp32 rounding; in bfloat16, which trains equally well, by more.
    """

    defaults_of_class = {  # noqa: RUF012
        "dtype": torch.float32,
        "lr": 1e-3,
        "weight_decay": 0.0,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "scale": "match_rms_adamw",
    }

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the momentum, of the shape of the matrices."""
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def update_batch(self, batch: Batch, group: dict[str, Any]) -> None:
        """Take one step for the parameters of a batch."""
        weights = [local_tensor(parameter) for parameter in batch.parameters]
        gradients = [local_tensor(parameter.grad) for parameter in batch.parameters]
        momenta = [local_tensor(momentum) for momentum in self.states(batch, "momentum_buffer")]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            momenta = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
        wholes = batch.wholes("momentum", batch.parameters, momenta, matmul_dtype(momenta[0].device, group["dtype"]))
        directions = [orthogonalize(whole, group["ns_steps"]) for whole in wholes]
        directions = self.normalized(batch, directions, group)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        for parameter, weight, direction in zip(
            batch.parameters, weights, batch.shards("momentum", directions), strict=True
        ):
            weight.add_(direction, alpha=-group["lr"] * SCALES[group["scale"]](*parameter.shape[-2:]))

    def normalized(self, batch: Batch, directions: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Normalize stacks of orthogonalized momenta before the step; Muon returns them unchanged."""
        return directions


class NorMuon(Muon):
    """Muon with rows of equal size over time. State: `momentum_buffer`, and `row_mean_square` ``[rows, 1]``."""

    defaults_of_class = Muon.defaults_of_class | {"beta2": 0.95}

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the momentum, and a number for each row."""
        rows = zeros_beside(parameter, parameter.shape[-2], 1)
        return {**super().new_state(parameter, group), "row_mean_square": rows}

    def normalized(self, batch: Batch, directions: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Divide each row by the root of its mean square over time, and restore the norm of the matrix."""
        states = self.states(batch, "row_mean_square")
        kept = [local_tensor(state) for state in states]
        squares = batch.wholes("rows", states, kept, torch.float32)
        found = []
        for direction, square in zip(directions, squares, strict=True):
            rows = direction.float()
            square.lerp_(rows.square().mean(-1, keepdim=True), 1 - group["beta2"])
            divided = rows / (square.sqrt() + ROW_EPSILON)
            before, after = (each.norm(dim=(-2, -1), keepdim=True) for each in (rows, divided))
            found.append((divided * (before / (after + ROW_EPSILON))).to(direction.dtype))
        for state, square in zip(kept, batch.shards("rows", squares), strict=True):
            state.copy_(square)
        return found


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Replace the singular values of each matrix by values near 1, by Newton-Schulz iteration.

    `matrices` is [batch, rows, columns]; the result has its shape and dtype, in which it is computed. Bfloat16 is
    precise enough, because the values only come near 1 anyway.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    # The Frobenius norm bounds every singular value, so all of them are now in [0, 1].
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x.mT @ x if tall else x @ x.mT  # over the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x


def matmul_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return float32 for `dtype` float32, and if products in bfloat16 are slow; else bfloat16."""
    return torch.bfloat16 if dtype != torch.float32 and bfloat16_is_fast(device) else torch.float32
