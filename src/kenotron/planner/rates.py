"""How long a GPU takes for an operator, and a group of ranks for a collective, at the rates of data sheets.

    an operator      its FLOPs or its bytes, whichever takes longer, and LAUNCH at least
    a product        at a share of the peak; less if its blocks are fewer than the GPU's processors
    a collective     what a rank sends, over the slowest wire on its way, and a latency for each hop

Shares of the peaks are those of `Gpu`. Latencies are those by which NCCL chooses its algorithms (src/graph/tuning.cc:
LL128 rings, trees between machines), and so is the way in which several ranks of a machine share its network: each ring
leaves it by another card.
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
"""Seconds in which the host asks for a kernel, with what Python does around it: of an eager step on a Xeon."""
BLOCK, DEPTH = 128, 4096
"""A product's result is computed in blocks of so many rows and columns; with more inner ones several share a block."""
LINK, NETWORK = 0.8, 0.85
START, LINK_HOP, NETWORK_HOP, TREE_HOP = 8.4e-6, 1.9e-6, 4.0e-6, 8.5e-6


def seconds_of(operator: Operator, gpu: Gpu) -> float:
    """How long `gpu` computes."""
    flops = gpu.fp32 if operator.dtype == torch.float32 else gpu.flops
    reached = 1.0
    if operator.kind == "product":
        rows, inner, columns = operator.shape
        blocks = ceil(rows / BLOCK) * ceil(columns / BLOCK) * max(1, inner // DEPTH)
        reached = gpu.products * min(1.0, blocks / gpu.processors)
    elif operator.kind == "attention":
        reached = gpu.attention.get(operator.shape[0], min(gpu.attention.values()))
    return max(operator.flops / (reached * flops), operator.moved / (gpu.memory * gpu.bandwidth), LAUNCH)


def seconds_between(kind: str, moved: float, group: Group, gpu: Gpu) -> float:
    """How long a collective takes, or a message to one rank. `moved`: the larger of what goes in and what comes out."""
    machines = ceil(group.size / group.on_machine)
    link, network = LINK * gpu.link, NETWORK * gpu.network
    if kind in ("send", "receive"):
        near = machines == 1
        return START + moved / (link if near else network) + (LINK_HOP if near else NETWORK_HOP)
    others = (group.size - 1) / group.size
    if kind == "exchange":  # each rank to each, by its own card
        away = (group.size - group.on_machine) / group.size
        return START + max(moved * (others - away) / link, moved * away / network) + LINK_HOP * (group.size - 1)
    hops = LINK_HOP * (group.size - machines) + NETWORK_HOP * (machines - 1)
    bandwidth = link if machines == 1 else min(link, network * group.on_machine)
    if kind != "sum":
        return START + hops + moved * others / bandwidth
    tree = 2 * (TREE_HOP * log2(machines) + LINK_HOP * group.on_machine)
    return START + min(2 * hops, tree) + 2 * moved * others / bandwidth
