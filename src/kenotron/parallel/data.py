"""Data parallelism: the one place that knows FSDP2.

``fully_shard`` keeps every parameter's fp32 master shard, hands the blocks a copy in the compute dtype, and
sums gradients over ranks in the reduce dtype:

    master fp32 ──cast, gather──▶ bf16 weights ──forward, backward──▶ bf16 gradients ──cast, sum──▶ fp32 ──▶ optimizer

On one rank nothing is wrapped: the layers cast their fp32 weights themselves (`models.blocks.linear`). FSDP2
on a mesh of one does the same with three times the copies.

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


def apply(model: nn.Module, plan: Plan, mesh: Mesh, *, compute_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Shard `model` over the mesh's dp_shard axis, block by block; at degree 1 leave it as it is."""
    if mesh.dp_degree == 1:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    assert mesh.device_mesh is not None
    dp_mesh = mesh.device_mesh["dp_shard"]
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
