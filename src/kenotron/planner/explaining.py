"""`kenotron plan --explain`: the parts of the largest rank's memory and of a step's time, and how to reduce each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from kenotron.config.packaged import packaged_yaml
from kenotron.planner.hardware import GIB
from kenotron.planner.verdict import COLUMNS, by_column

if TYPE_CHECKING:
    from kenotron.planner.planning import RunPlan

TEXTS = packaged_yaml("kenotron.planner", "explaining.yaml")
LEAST = 0.01
"""The smallest share that is shown."""


def explained(plan: RunPlan) -> Iterator[str]:
    """Yield lines that explain the memory of the rank with the largest peak, and a step's time on the busiest stage."""
    rank = max(plan.ranks, key=lambda rank: rank.peak.bytes)
    yield f"Rank {rank.rank} holds {rank.peak.bytes / GIB:.3g} GiB at its peak:"
    yield from _shares(dict(zip(COLUMNS, by_column(rank.peak.of))), "memory", lambda size: f"{size / GIB:6.3g} GiB")
    if plan.speed is not None:
        busiest, spent = min(zip(plan.ranks, plan.speed.ranks), key=lambda pair: pair[1].of.get("waits for pp", 0.0))
        yield f"A step takes {1000 * plan.speed.seconds:,.1f} ms, of rank {busiest.rank}:"
        yield from _shares(spent.of, "time", lambda size: f"{1000 * size:9,.1f} ms")


def _shares(parts: Mapping[str, float], kind: str, formatted: Callable[[float], str]) -> Iterator[str]:
    total = sum(parts.values())
    for part, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= LEAST * total:
            what, less = TEXTS[kind].get(part, ("other queues of the GPU", "nothing known"))
            yield f"  {size / total:4.0%} {formatted(size)}  {part}: {what}. Less with {less}."
