"""SOAP, which runs Adam in the eigenbasis of Shampoo's preconditioner.

    L  <-  beta2 L + (1 - beta2) G G^T        R  <-  beta2 R + (1 - beta2) G^T G        of the gradient G
    G' =  Q_L^T G Q_R                         Q_L, Q_R: eigenvectors of L and R
    M  <-  beta1 M + (1 - beta1) G            V  <-  beta2 V + (1 - beta2) G'^2
    W  <-  W (1 - lr * weight_decay) - lr * Q_L [ M' / (sqrt(V) + eps) ] Q_R^T          M' = Q_L^T M Q_R, bias-corrected

Eigenvectors are computed once, and updated every `precondition_frequency` steps by one step of power iteration and a QR
decomposition. The first step only initializes L and R, so that a gradient is never projected on a basis made of itself.
Everything is fp32, on whole matrices: state and gradients of sharded ones are sent to the owner and back at every step,
which costs more than Muon's two transfers of half a gradient.

Source: Vyas et al., "SOAP: Improving and stabilizing Shampoo using Adam" (arXiv 2409.11321), algorithm 3.
"""

from typing import Any

import torch
from torch import Tensor

from kenotron.optim.matrices import Batch, MatrixOptimizer, zeros_beside
from kenotron.parallel.shards import local_tensor

ROTATED = ("exp_avg", "exp_avg_sq", "left", "right", "left_basis", "right_basis")


class Soap(MatrixOptimizer):
    """SOAP over matrices ``[rows, columns]``.

    State: `step`; `exp_avg`, and `exp_avg_sq` in the eigenbasis; `left`, `left_basis` ``[rows, rows]``, `right`,
    `right_basis` ``[columns, columns]``.
    """

    defaults_of_class = {  # noqa: RUF012
        "lr": 3e-3,
        "weight_decay": 0.0,
        "betas": (0.95, 0.95),
        "eps": 1e-8,
        "precondition_frequency": 10,
    }

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return zeros for all state."""
        rows, columns = parameter.shape[-2:]
        moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
        left = {key: zeros_beside(parameter, rows, rows) for key in ("left", "left_basis")}
        right = {key: zeros_beside(parameter, columns, columns) for key in ("right", "right_basis")}
        return {"step": torch.zeros(()), **moments, **left, **right}

    def update_batch(self, batch: Batch, group: dict[str, Any]) -> None:
        """Take one step for the parameters of a batch, which have equal step counts."""
        steps = self.states(batch, "step")
        for each in steps:
            each += 1
        assert all(each == steps[0] for each in steps), "parameters of one batch have taken equally many steps"
        weights = [local_tensor(parameter) for parameter in batch.parameters]
        gradients = [local_tensor(parameter.grad) for parameter in batch.parameters]
        kept = {key: [local_tensor(state) for state in self.states(batch, key)] for key in ROTATED}
        wholes = [batch.wholes("gradient", batch.parameters, gradients, torch.float32)]
        wholes += [batch.wholes(key, self.states(batch, key), kept[key], torch.float32) for key in ROTATED]
        directions = [whole_update(group, int(steps[0]), *each) for each in zip(*wholes, strict=True)]
        for key, stacks in zip(ROTATED, wholes[1:], strict=True):
            for state, new in zip(kept[key], batch.shards(key, stacks), strict=True):
                state.copy_(new)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, batch.shards("gradient", directions), alpha=-group["lr"])


def whole_update(
    group: dict[str, Any],
    step: int,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    left: Tensor,
    right: Tensor,
    left_basis: Tensor,
    right_basis: Tensor,
) -> Tensor:
    """Return the direction of step 1, 2, … for a stack ``[n, rows, columns]``, and update its state in place."""
    beta1, beta2 = group["betas"]
    direction = torch.zeros_like(gradient)
    if step > 1:
        mean.lerp_(gradient, 1 - beta1)
        square.lerp_((left_basis.mT @ gradient @ right_basis).square(), 1 - beta2)
        size = (square / (1 - beta2 ** (step - 1))).sqrt_().add_(group["eps"])
        rotated = left_basis.mT @ mean @ right_basis / (1 - beta1 ** (step - 1))
        direction = left_basis @ (rotated / size) @ right_basis.mT
    left.lerp_(gradient @ gradient.mT, 1 - beta2)
    right.lerp_(gradient.mT @ gradient, 1 - beta2)
    if step == 1:
        left_basis.copy_(torch.linalg.eigh(left)[1].flip(-1))
        right_basis.copy_(torch.linalg.eigh(right)[1].flip(-1))
    elif (step - 1) % group["precondition_frequency"] == 0:
        square.copy_(_follow(left, left_basis, square))
        square.copy_(_follow(right, right_basis, square.mT).mT)
    return direction


def _follow(covariance: Tensor, basis: Tensor, square: Tensor) -> Tensor:
    """Move `basis` towards the eigenvectors of `covariance`, largest first; return `square` with reordered rows.

    ``[n, size, size]``, ``[n, size, size]``, ``[n, size, columns]``.
    """
    values = (basis * (covariance @ basis)).sum(-2)
    order = values.argsort(-1, descending=True)
    sorted_basis = basis.gather(-1, order[:, None, :].expand_as(basis))
    basis.copy_(torch.linalg.qr(covariance @ sorted_basis)[0])
    return square.gather(-2, order[..., None].expand_as(square))
