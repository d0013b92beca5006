"""Waiting for all ranks where nobody can say how long it takes: one machine may tokenize for hours, another not at all.

    rank 0   finds its tokens in the cache ─▶ arrives ─▶ waits ──────────────┐
    rank 1   tokenizes for two hours ─────────────────────────────▶ arrives ─┴─▶ both go on, and collectives may begin

A collective would give up after `parallelism.timeout_seconds`, because later on a rank that keeps the others waiting
for so long is lost.
"""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

LOOK_EVERY_S = 0.1


def wait_for_all() -> None:
    """Return when every rank has called this as often as this one. Without a process group: at once."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = distributed_c10d._get_default_store()
    mine = store.add(f"kenotron/arrivals/{dist.get_rank()}", 1)
    store.add(f"kenotron/arrivals/of/{mine}", 1)
    while store.add(f"kenotron/arrivals/of/{mine}", 0) < dist.get_world_size():
        time.sleep(LOOK_EVERY_S)
