"""The time of a GPU for an operator, and of a group of ranks for a collective, at the rates of data sheets.

    an operator      the longer of the times for its FLOPs and its bytes, and at least LAUNCH
    a product        at a share of the peak; less if it has fewer blocks than the GPU has processors
    a collective     the bytes that a rank sends, over the slowest link of the path, and a latency for each hop

The shares of the peaks are fields of `Gpu`. The latencies are those with which NCCL chooses its algorithms
(src/graph/tuning.cc: LL128 rings, trees between machines). As in NCCL, the rings of a machine's ranks each use another
network card.
"""

from __future__ import annotations

from math import ceil, log2
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kenotron.planner.hardware import Gpu
    from kenotron.planner.trace import Group, Operator

LAUNCH = 3e-6
HOST = 60e-6
"""The host's seconds to launch a kernel, including Python, measured in an eager step on a Xeon."""
BLOCK, DEPTH = 128, 4096
"""The rows and columns of a block of a product's result, and the inner dimension that one processor computes of it."""
LINK, NETWORK = 0.8, 0.85
START, LINK_HOP, NETWORK_HOP, TREE_HOP = 8.4e-6, 1.9e-6, 4.0e-6, 8.5e-6


def seconds_of(operator: Operator, gpu: Gpu) -> float:
    """Return the time that `gpu` takes for an operator."""
    flops = gpu.fp32 if operator.dtype == torch.float32 else gpu.flops
    share = 1.0
    if operator.kind == "product":
        rows, inner, columns = operator.shape
        blocks = ceil(rows / BLOCK) * ceil(columns / BLOCK) * max(1, inner // DEPTH)
        share = gpu.products * min(1.0, blocks / gpu.processors)
    elif operator.kind == "attention":
        share = gpu.attention.get(operator.shape[0], min(gpu.attention.values()))
    return max(operator.flops / (share * flops), operator.moved / (gpu.memory * gpu.bandwidth), LAUNCH)


def seconds_between(kind: str, moved: float, group: Group, gpu: Gpu) -> float:
    """Return the time of a collective or a message. `moved`: the larger of its input and output in bytes."""
    machines = ceil(group.size / group.on_machine)
    link, network = LINK * gpu.link, NETWORK * gpu.network
    if kind in ("send", "receive"):
        rate, latency = (link, LINK_HOP) if machines == 1 else (network, NETWORK_HOP)
        return START + moved / rate + latency
    others = (group.size - 1) / group.size
    if kind == "exchange":  # all-to-all, in which every rank uses its own network card
        away = (group.size - group.on_machine) / group.size
        return START + max(moved * (others - away) / link, moved * away / network) + LINK_HOP * (group.size - 1)
    hops = LINK_HOP * (group.size - machines) + NETWORK_HOP * (machines - 1)
    bandwidth = link if machines == 1 else min(link, network * group.on_machine)
    if kind != "sum":
        return START + hops + moved * others / bandwidth
    tree = 2 * (TREE_HOP * log2(machines) + LINK_HOP * group.on_machine)
    return START + min(2 * hops, tree) + 2 * moved * others / bandwidth
