"""Matrix products that hide their collective: async tensor parallelism on torch's symmetric memory.

A token shard x_r on each of four GPUs; every one of them needs (all x) W_r:

    gather, then multiply      copy x_1 x_2 x_3 ─────────▶ │ x W
    fused                      x_0 W │ x_1 W │ x_2 W │ x_3 W      each shard is multiplied as soon as it arrives,
                               copy x_1 │ x_2 │ x_3               copied from the neighbour's memory by the copy engine

and the other way round a product's rows are sent to their owners while the next rows are multiplied (Wang et al. 2023,
"Overlap Communication with Dependent Computation via Decomposition"; torch's ``symm_mem`` operators do the work).

The operators need GPUs that reach each other's memory: `available` is the one place that knows. They are young in
torch, so nothing outside this file names them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import permutations

import torch
import torch.distributed as dist
from torch import Tensor

_ops = torch.ops.symm_mem
LEAST_CAPABILITY = (8, 0)


def available(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of `group` can use the fused products: GPUs of one machine that reach each other's memory.

    The result is the same on every rank of the group, and nothing is sent.
    """
    if not torch.cuda.is_available():
        return False
    from torch.distributed import _symmetric_memory  # noqa: F401 - defines the operators

    ranks = dist.get_process_group_ranks(group)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    devices = [rank % here for rank in ranks]
    if len({rank // here for rank in ranks}) > 1 or max(devices) >= torch.cuda.device_count():
        return False
    suits = hasattr(_ops, "fused_all_gather_matmul") and torch.cuda.get_device_capability() >= LEAST_CAPABILITY
    return suits and all(torch.cuda.can_device_access_peer(one, other) for one, other in permutations(devices, 2))


def gather_and_multiply(
    x: Tensor, weights: Sequence[Tensor], group: dist.ProcessGroup, keep: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """x ``[n, in]`` of every rank as ``[n * ranks, in]`` (None unless `keep`), and its products with `weights`
    ``[in, out]``.
    """
    return _ops.fused_all_gather_matmul(x.contiguous(), list(weights), 0, group.group_name, return_A=keep)


def multiply_and_scatter(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's rows ``[n / ranks, out]`` of the sum over ranks of x ``[n, in]`` times weight ``[in, out]``."""
    return _ops.fused_matmul_reduce_scatter(x, weight, "sum", 0, group.group_name)
