"""Compute the global gradient norm, and clip gradients by it.

On any layout, the norm is that of the whole model's gradient as one vector. For two parameters on a
two-way shard:

    rank 0 holds  a[:2], b          rank 1 holds  a[2:], b           a is sharded, b is replicated
    sum of squares of a: local, then all-reduced over the axis that shards it
    sum of squares of b: local, already the same on both

So gradients are grouped by the mesh axes that shard them; each group costs one sum and one small all-reduce per axis,
and pipeline stages add their totals at the end. Nothing waits for the device: the norm is returned as a tensor.

On an accelerator, torch's fused Adam can divide gradients by a number and skip a step itself (`decides_alone`), so the
update is queued before the host has the norm (`step_where_finite`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from kenotron.kernels.shortcuts import reads_are_free
from kenotron.parallel.collectives import all_reduce
from kenotron.parallel.shards import local_tensor

if TYPE_CHECKING:
    from kenotron.parallel.mesh import Mesh

Sharding = tuple[Any, tuple[int, ...]]
CHUNK_ELEMENTS = 2**18  # elements that are added in one chain of float32 additions
EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_: a gradient of zero norm stays unchanged


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None, mesh: Mesh | None = None) -> Tensor:
    """Scale all gradients in place so that their global L2 norm is at most `max_norm`.

    `max_norm` None leaves them unchanged. `mesh` is needed only for the sum over pipeline stages.
    Returns the norm before clipping, a 0-dim float32 tensor on the gradients' device, equal on every rank.
    If the norm is not finite, the gradients are useless, and the caller must skip the step.
    """
    shards = _local_gradients(parameters)
    norm = _global_norm(shards, mesh)
    if max_norm is None:
        return norm
    coefficient = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    if not reads_are_free(coefficient) or coefficient < 1.0:  # saves a pass over gradients that need no scaling
        for gradients in shards.values():
            torch._foreach_mul_(gradients, coefficient)
    return norm


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients by `factor` in place."""
    for gradients in _local_gradients(parameters).values():
        torch._foreach_mul_(gradients, factor)


def decides_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step_where_finite` is possible: for a fused Adam(W) on an accelerator, with whole parameters."""
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return False
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = not any(reads_are_free(each) or hasattr(each, "placements") for each in parameters)
    return whole and all(group["fused"] for group in optimizer.param_groups)


def step_where_finite(optimizer: Any, numbers: Tensor, norm: Tensor, max_norm: float | None) -> None:
    """Queue ``optimizer.step()`` with gradients clipped to `max_norm`, without waiting for their global `norm`.

    If one of `numbers` is not finite, the device leaves weights and optimizer state unchanged.
    """
    optimizer.found_inf = numbers.isfinite().all().logical_not().float()
    optimizer.grad_scale = None if max_norm is None else ((norm + EPSILON) / max_norm).clamp(min=1.0)
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf, optimizer.grad_scale


def _local_gradients(parameters: Iterable[Tensor]) -> dict[Sharding, list[Tensor]]:
    """Return the local shards of all gradients, by sharding."""
    shards: dict[Sharding, list[Tensor]] = defaultdict(list)
    parameter: Any  # a tensor or a DTensor, whose class runs without DTensors do not import
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if any(placement.is_partial() for placement in getattr(gradient, "placements", ())):
            # The gradient of a weight used on sequence shards or some heads is still a partial sum on each rank.
            gradient = gradient.redistribute(placements=parameter.placements)
            parameter.grad = gradient
        shards[sharding_of(gradient)].append(local_tensor(gradient))
    return shards


def sharding_of(tensor: Any) -> Sharding:
    """Return a DTensor's device mesh and the mesh dimensions that shard it; (None, ()) for a plain tensor."""
    if not hasattr(tensor, "placements"):
        return None, ()
    mesh = tensor.device_mesh
    pairs = enumerate(tensor.placements)
    return mesh, tuple(dim for dim, placement in pairs if not placement.is_replicate() and mesh.size(dim) > 1)


def _global_norm(shards: dict[Sharding, list[Tensor]], mesh: Mesh | None) -> Tensor:
    totals = []
    for (device_mesh, sharded), gradients in shards.items():
        total = _sum_of_squares(gradients)
        for dim in sharded:
            dist.all_reduce(total, group=device_mesh.get_group(dim))
        totals.append(total)
    total = torch.stack(totals).sum() if totals else torch.zeros(())
    if mesh is not None:
        all_reduce(total, mesh.group("pp"))
    return total.sqrt()


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Return the sum of squares of plain tensors in float32."""
    on_cpu = gradients[0].device.type == "cpu"
    return _sum_of_squares_by_dot(gradients) if on_cpu else _sum_of_squares_by_norm(gradients)


def _sum_of_squares_by_dot(gradients: list[Tensor]) -> Tensor:
    """Compute on CPUs, whose norm kernel adds in one chain, by BLAS' dot of chunks: 100x more exact, and as fast."""
    chunks = [chunk for gradient in gradients for chunk in gradient.reshape(-1).split(CHUNK_ELEMENTS)]
    return torch.stack([torch.dot(chunk, chunk) for chunk in map(Tensor.float, chunks)]).sum()


def _sum_of_squares_by_norm(gradients: list[Tensor]) -> Tensor:
    """Compute on accelerators, with one kernel for all gradients, each summed as a tree."""
    return torch.stack(torch._foreach_norm(gradients, 2.0, dtype=torch.float32)).square().sum()
