"""`kenotron plan --html`: a plan on one HTML page, which needs no network and no server.

The page (page.html) draws everything itself; this file puts the numbers into it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.planner.verdict import COLUMNS, by_column, in_words

if TYPE_CHECKING:
    from kenotron.planner.memory import RankPlan
    from kenotron.planner.speed import Speed
    from kenotron.planner.timeline import Bar, Spent
    from kenotron.planner.verdict import Verdict

PAGE = Path(__file__).with_name("page.html")
DRAWN = 1000
"""What is shorter than this part of a step is not seen."""
SITES = 60


def plan_page(
    title: str, verdict: Verdict, lines: Sequence[str], plans: Sequence[RankPlan], speed: Speed | None
) -> str:
    """The page of a plan, as the text of an HTML file; `lines` are said below the verdict."""
    spent: Sequence[Spent | None] = [None] * len(plans) if speed is None else speed.ranks
    data = {
        "verdict": in_words(verdict),
        "fits": verdict.fits,
        "usable": verdict.usable,
        "lines": lines,
        "seconds": 0 if speed is None else speed.seconds,
        "ranks": [_rank(plan, each) for plan, each in zip(plans, spent)],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # no text ends the script
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    page = PAGE.read_text(encoding="utf-8").replace("<title></title>", f"<title>{escaped}</title>")
    return page.replace("/*PLAN*/{}", text)


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
