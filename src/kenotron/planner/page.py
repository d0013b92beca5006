"""`kenotron plan --html`: make an HTML page of a plan, which needs no network and no server.

The page (page.html) draws the numbers; this module inserts them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.planner.planning import headline, saved_in_words, speed_in_words
from kenotron.planner.verdict import COLUMNS, by_column, in_words

if TYPE_CHECKING:
    from kenotron.planner.memory import RankPlan
    from kenotron.planner.planning import RunPlan
    from kenotron.planner.timeline import Bar, Spent

PAGE = Path(__file__).with_name("page.html")
DRAWN = 1000
"""The resolution of the page: gaps shorter than a step divided by it are not drawn."""
SITES = 60
KEYS = (
    *(f"parallelism.{name}" for name in ("dp", "tp", "pp", "context_parallel_size", "expert_parallel_size")),
    *("parallelism.tp_mode", "parallelism.pp_engine", "parallelism.recompute_layer", "optimizer.zero_stage"),
    "parallelism.dp_shard",
    *("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica", "tokens.sequence_length"),
)
"""The keys that have separate fields on the served page."""


def page_of(data: dict[str, Any]) -> str:
    """Return an HTML file that draws `data`, from `page_data` or the server of the page."""
    # "</script>" in a text would end the script.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace("/*PLAN*/{}", text)


def page_data(plan: RunPlan, name: str) -> dict[str, Any]:
    """Return the data that the page draws."""
    speed = plan.speed
    lines = [] if speed is None else [speed_in_words(plan.config, speed)]
    if plan.saved is not None:
        lines.append(saved_in_words(plan.saved))
    if plan.nearest:
        lines.append(f"The nearest that fits: {' '.join(plan.nearest)}")
    spent: Sequence[Spent | None] = [None] * len(plan.ranks) if speed is None else speed.ranks
    return {
        "title": f"{name}: {headline(plan.config, plan.gpu)}",
        "verdict": in_words(plan.verdict),
        "fits": plan.verdict.fits,
        "usable": plan.verdict.usable,
        "lines": lines,
        "seconds": 0 if speed is None else speed.seconds,
        "keys": {key: reduce(getattr, key.split("."), plan.config) for key in KEYS},
        "ranks": [_rank(rank, of_rank) for rank, of_rank in zip(plan.ranks, spent)],
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
    """Return the bars of a rank; bars of one micro-batch and kind are merged if the gap is too short to be drawn."""
    drawn: list[Bar] = []
    for begin, end, which, number in spent.bars:
        if drawn and drawn[-1][2:] == (which, number) and begin - drawn[-1][1] < spent.seconds / DRAWN:
            begin = drawn.pop()[0]
        drawn.append((round(begin, 7), round(end, 7), which, number))
    return drawn
