"""`kenotron plan --html`: a plan on one HTML page, which needs no network and no server.

The page (page.html) draws everything itself; this file puts the numbers into it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.planner.planning import headline, speed_in_words
from kenotron.planner.verdict import COLUMNS, by_column, in_words

if TYPE_CHECKING:
    from kenotron.planner.memory import RankPlan
    from kenotron.planner.planning import Plan
    from kenotron.planner.timeline import Bar, Spent

PAGE = Path(__file__).with_name("page.html")
DRAWN = 1000
"""What is shorter than this part of a step is not seen."""
SITES = 60
KEYS = (
    *(f"parallelism.{name}" for name in ("dp", "tp", "pp", "context_parallel_size", "expert_parallel_size")),
    *("parallelism.tp_mode", "parallelism.pp_engine", "parallelism.recompute_layer", "optimizer.zero_stage"),
    "parallelism.dp_shard",
    *("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica", "tokens.sequence_length"),
)
"""What is changed on the served page by fields of their own."""


def page_of(data: dict[str, Any]) -> str:
    """The text of an HTML file that draws `data`, which `page_data` has made or the server of the page."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # no text ends the script
    return PAGE.read_text(encoding="utf-8").replace("/*PLAN*/{}", text)


def page_data(plan: Plan, name: str) -> dict[str, Any]:
    """What the page draws."""
    speed = plan.speed
    lines = [] if speed is None else [speed_in_words(plan.config, speed)]
    lines += [f"The nearest that fits: {' '.join(plan.nearest)}"] if plan.nearest else []
    spent: Sequence[Spent | None] = [None] * len(plan.ranks) if speed is None else speed.ranks
    return {
        "title": f"{name} on {headline(plan.config, plan.gpu)}",
        "verdict": in_words(plan.verdict),
        "fits": plan.verdict.fits,
        "usable": plan.verdict.usable,
        "lines": lines,
        "seconds": 0 if speed is None else speed.seconds,
        "keys": {key: reduce(getattr, key.split("."), plan.config) for key in KEYS},
        "ranks": [_rank(rank, each) for rank, each in zip(plan.ranks, spent)],
    }


def _rank(plan: RankPlan, spent: Spent | None) -> dict[str, Any]:
    moments = [dict(zip(plan.peak.over_time, values)) for values in zip(*plan.peak.over_time.values())]
    columns = zip(*(by_column(moment) for moment in moments))
    return {
        "rank": plan.rank,
        "stage": plan.stage,
        "peak": dict(zip(COLUMNS, by_column(plan.peak.of))),
        "over_time": dict(zip(COLUMNS, columns)),
        "largest": [
            (kind if kind in COLUMNS else "other", site, size) for kind, site, size in plan.peak.largest[:SITES]
        ],
        "of": {} if spent is None else spent.of,
        "slowest": [] if spent is None else spent.largest[:SITES],
        "bars": [] if spent is None else _bars(spent),
    }


def _bars(spent: Spent) -> list[Bar]:
    """The bars of a rank, those of one micro-batch and kind with gaps that are not seen as one."""
    drawn: list[Bar] = []
    for begin, end, which, number in spent.bars:
        if drawn and drawn[-1][2:] == (which, number) and begin - drawn[-1][1] < spent.seconds / DRAWN:
            begin = drawn.pop()[0]
        drawn.append((round(begin, 7), round(end, 7), which, number))
    return drawn
