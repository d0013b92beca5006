"""Muon: hidden matrices move by their orthogonalized momentum, everything else by AdamW.

The momentum of a weight matrix is usually near low rank: a few directions take the whole step. Muon keeps
its singular vectors and sets the singular values near 1, so that every direction moves:

    momentum  M = U diag(10, 1, 0.1) V^T        step  O = U diag(~1, ~1, ~1) V^T

Five Newton-Schulz iterations do this with matrix products alone. Each maps every singular value s to a s +
b s^3 + c s^5; (a, b, c) rise so steeply at 0 that small values come up fast, and settle between about 0.7
and 1.2.

    M  <-  mu M + (1 - mu) G                      momentum of the gradient G
    O  <-  NewtonSchulz(mu M + (1 - mu) G)        with Nesterov, otherwise NewtonSchulz(M)
    W  <-  W (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(rows, columns)) * O

A matrix with orthonormal rows or columns has root-mean-square 1 / sqrt(max(rows, columns)), so the factor
gives each step an RMS of about 0.2: that of AdamW's steps. Learning rate and weight decay tuned for AdamW
carry over, and one schedule serves both.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), for the iteration
and its coefficients; Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982), for the factor and
the weight decay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from kenotron.kernels.bfloat16 import bfloat16_is_fast
from kenotron.optim.matrix_owners import Exchange, balance, in_rounds, mesh_group
from kenotron.parallel.shards import local_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADAMW_RMS = 0.2
EPSILON = 1e-7  # the norm of an all-zero momentum
BATCH_ELEMENTS = 2**22  # of matrices orthogonalized together: 8 MB in bfloat16


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the groups with `"algorithm": "muon"`, AdamW for those with `"algorithm": "adamw"`.

    `params` are group dictionaries, as `parameter_groups` makes them; the other arguments are defaults that
    a group may override. Muon's matrices must be 2-D, [rows, columns]; they may be DTensors, sharded in any way, those
    of a group over one mesh: then every rank of the mesh must step, and each matrix is gathered to one owner
    (`matrix_owners.Exchange`), so that updates do not depend on the layout. State: `momentum_buffer` for Muon, sharded
    as the matrix; `step`, `exp_avg`, `exp_avg_sq` for AdamW.
    """

    starts_at_zero = True  # a state of zeros is that before the first step (`optim.state`)

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
    ) -> None:
        defaults = {
            "algorithm": "muon",
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "betas": betas,
            "eps": eps,
            "fused": fused,
        }
        super().__init__(params, defaults)
        self._planned: dict[tuple[int, ...], list[Batch]] = {}
        self._groups: dict[Any, Any] = {}  # one of each mesh: restoring state asks for one matrix at a time
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                for parameter in group["params"]:
                    _check_matrix(parameter)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the argument is for torch's helpers
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["algorithm"] == "adamw":
                self._step_adamw(group, parameters)
            else:
                self._step_muon(group, parameters)

    def _step_muon(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        for batch, exchange in self._batches(parameters):
            weights = [local_tensor(parameter) for parameter in batch]
            gradients = [local_tensor(parameter.grad) for parameter in batch if parameter.grad is not None]
            momenta = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in batch]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            if group["nesterov"]:
                momenta = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
            updates = self._orthogonal(momenta, exchange, group["ns_steps"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            for parameter, weight, update in zip(batch, weights, updates, strict=True):
                weight.add_(update, alpha=-group["lr"] * ADAMW_RMS * math.sqrt(max(parameter.shape)))

    def _orthogonal(self, momenta: list[Tensor], exchange: Exchange | None, steps: int) -> list[Tensor]:
        """Orthogonalized as whole matrices, here or, when other ranks hold parts of them, by their owners."""
        dtype = matmul_dtype(momenta[0].device)
        if exchange is None:
            return list(orthogonalize(torch.stack([momentum.to(dtype) for momentum in momenta]), steps).unbind())
        wholes = exchange.gather(momenta)
        return exchange.scatter([orthogonalize(whole[None], steps)[0] for whole in wholes])

    def _batches(self, parameters: list[Tensor]) -> list[tuple[list[Tensor], Exchange | None]]:
        """What is orthogonalized together: matrices of one shape, or what owners take in one round."""
        key = tuple(map(id, parameters))
        if key not in self._planned:
            mesh = getattr(parameters[0], "device_mesh", None) if parameters else None
            shared = mesh is not None and mesh.size() > 1
            if shared and mesh is not None and mesh not in self._groups:
                self._groups[mesh] = mesh_group(mesh)
            self._planned[key] = _rounds(parameters, mesh, self._groups[mesh]) if shared else _same_shape(parameters)
        return self._planned[key]

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Replaces the singular values of each matrix by values near 1, by Newton-Schulz iteration.

    `matrices` is [batch, rows, columns]; the result has its shape and dtype, and so has the computation. Bfloat16 is
    precise enough, as the values only come near 1 anyway.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    # The Frobenius norm bounds every singular value, so all of them now lie in [0, 1].
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(steps):
        gram = x.mT @ x if tall else x @ x.mT  # of the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Bfloat16 where its matrix products are fast, float32 elsewhere."""
    return torch.bfloat16 if bfloat16_is_fast(device) else torch.float32


Batch = tuple[list[Tensor], "Exchange | None"]


def _same_shape(parameters: list[Tensor]) -> list[Batch]:
    """Batches of equal shape, of at most `BATCH_ELEMENTS` elements or one matrix."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_shape[parameter.shape].append(parameter)
    batches: list[Batch] = []
    for shape, same in by_shape.items():
        size = max(1, BATCH_ELEMENTS // shape.numel())
        batches += [(same[start : start + size], None) for start in range(0, len(same), size)]
    return batches


def _rounds(parameters: list[Tensor], mesh: Any, group: Any) -> list[Batch]:
    """Rounds in which every rank of `mesh` (`group`) owns equal work, and at most `BATCH_ELEMENTS` or one matrix."""
    owner = balance([math.prod(p.shape) * min(p.shape) for p in parameters], mesh.size())
    dtype = matmul_dtype(local_tensor(parameters[0]).device)
    batches: list[Batch] = []
    for indices in in_rounds([p.numel() for p in parameters], owner, BATCH_ELEMENTS):
        some = [parameters[i] for i in indices]
        batches.append((some, Exchange(some, [owner[i] for i in indices], group, dtype)))
    return batches


def _check_matrix(parameter: Tensor) -> None:
    if parameter.ndim != 2:
        raise ValueError(f"Muon: expected a matrix, found shape {tuple(parameter.shape)}")
