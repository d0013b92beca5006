"""Data parallelism and master weights: the one place that knows FSDP2.

``fully_shard`` keeps every parameter's fp32 master shard, hands the blocks a copy in the compute dtype, and
sums gradients in the reduce dtype. Even on one rank that is the leanest way to train in bf16 with fp32
masters:

    master fp32 ──cast──▶ bf16 weights ──forward, backward──▶ bf16 gradients ──cast, sum──▶ fp32 ──▶ optimizer

In fp32 on one rank there is nothing to cast and nobody to talk to, so the module stays plain.

Losses are sums (docs/architecture.md), so every reduction must be a plain sum. Neither setting below
recurses, and set on the root alone gradients are off by the world size without a word: `apply` sets them on
every FSDP module.
"""

from __future__ import annotations

import torch
from torch import nn

from kenotron.models import Plan
from kenotron.models.plan import modules
from kenotron.parallel.mesh import Mesh


def apply(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Shard `model` over the mesh's dp_shard axis, block by block. Needs a process group unless it stays plain."""
    if mesh.dp_degree == 1 and compute_dtype == torch.float32:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if mesh.device_mesh is not None and mesh.degree("dp_shard") > 1:
        dp_mesh = mesh.device_mesh["dp_shard"]
    else:  # masters only: a mesh of this rank alone
        dp_mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("dp_shard",))
    # cast_forward_inputs would round the fp32 RoPE tables; the embedding already emits the compute dtype.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for _, block in modules(model, plan.blocks):
        fully_shard(block, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=dp_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _sharded(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_last_micro_batch(model: nn.Module, last: bool) -> None:
    """Communicate and drop the gathered weights only after the last micro-batch of a step.

    The last one must reshard: otherwise the next step trains on stale weights without a word.
    """
    for module in _sharded(model):
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)


def show_masters(model: nn.Module) -> None:
    """Make ``model.parameters()`` the fp32 masters again after a forward without backward.

    Backward drops the copies in the compute dtype; validation and sampling have none, and whoever saves the
    parameters next, or looks up their optimizer state, would find the copies.
    """
    for module in _sharded(model):
        module.reshard()


def _sharded(model: nn.Module) -> list:
    """The FSDP modules of `model`; none when it is plain (and then FSDP is never imported)."""
    if not hasattr(model, "set_requires_gradient_sync"):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
