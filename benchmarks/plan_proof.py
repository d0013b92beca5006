"""What `kenotron plan` predicts, compared with what ranks then hold, in the layouts of test_planned_memory.py.

    make plan-proof                                           # all: half an hour on two cores
    python benchmarks/plan_proof.py --only "mixtral|pp=2"     # those whose names contain this

Ranks over gloo on a CPU are measured in two ways: every storage of torch's, by the counter that plans, and the reports
of torch's allocator, which sees inside operators, too. What gloo's threads release late counts as long: the least of
some steps is taken. The picture (docs/pictures/plan-proof-*.svg) is drawn when all layouts were compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "planner")]

from test_planned_memory import CASES, QUICK  # noqa: E402

from pictures import THEMES, drawing  # noqa: E402
from support.plans import allocated, config_of, measure, predict  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

REPEATS = 6
BARS = {"storages": "worst 0.5%", "allocator": "median 0.5%, 95% of ranks 2%"}


class Rank(NamedTuple):
    """Bytes at the peak of a step: planned, of all storages, and by the allocator."""

    case: str
    rank: int
    planned: int
    storages: int
    allocator: int

    def error(self, measured: str) -> float:
        """How much more is planned, as a share of what was measured."""
        return self.planned / float(getattr(self, measured)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only layouts whose names contain this")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder of the picture")
    given = parser.parse_args()
    cases = [case for case in (*QUICK, *CASES) if given.only in case]
    ranks: list[Rank] = []
    print(f"{'layout':62} rank    planned   storages          allocator")
    begun = time.monotonic()
    for done, case in enumerate(cases, start=1):
        ranks += compared(case)
        left = (time.monotonic() - begun) / done * (len(cases) - done)
        print(f"{done} of {len(cases)}, {left / 60:.0f} min left", file=sys.stderr)
    for measured, bar in BARS.items():
        print(summary(measured, ranks), f"(bar: {bar})")
    if not given.only:
        for theme, colours in THEMES.items():
            draw(ranks, colours, given.out / f"plan-proof-{theme}.svg")


def compared(case: str) -> list[Rank]:
    """Plan and measure every rank of a layout, and print them."""
    count = config_of(case).parallelism.world_size
    planned = [peak for peak, _ in predict(case)]
    storages = [peak for peak, _ in run_ranks(count, measure, case)]
    allocator = run_ranks(count, allocated, case, 1 if count == 1 else REPEATS)
    ranks = [Rank(case, number, *each) for number, each in enumerate(zip(planned, storages, allocator, strict=True))]
    for each in ranks:
        print(
            f"{each.case:62} {each.rank:4} {each.planned:10,} {each.storages:10,} {each.error('storages'):+7.2%}"
            f" {each.allocator:10,} {each.error('allocator'):+7.2%}",
            flush=True,
        )
    return ranks


def summary(measured: str, ranks: list[Rank]) -> str:
    """A line of the errors' sizes."""
    errors = sorted(abs(each.error(measured)) for each in ranks)
    of_most = errors[int(0.95 * (len(errors) - 1))]
    layouts = len({each.case for each in ranks})
    return (
        f"{measured}: {layouts} layouts, {len(errors)} ranks: median {statistics.median(errors):.3%}, "
        f"95% of ranks within {of_most:.2%}, worst {errors[-1]:.2%}"
    )


def draw(ranks: list[Rank], colours: dict[str, str], file: Path) -> None:
    """Draw the errors of all ranks, the smallest first."""
    with drawing(file, colours, (7.5, 3.2)) as figure:
        axes = figure.subplots()
        for colour, measured in zip(("#2e86ab", "#d1495b"), BARS):
            errors: list[Any] = sorted(100 * each.error(measured) for each in ranks)
            axes.plot(errors, ".", color=colour, markersize=4, label=f"beside {measured}")
        axes.axhspan(-0.5, 0.5, color=colours["grid"], alpha=0.4, linewidth=0)
        axes.set_xlabel(f"{len(ranks)} ranks of {len({each.case for each in ranks})} layouts, by error")
        axes.set_ylabel("planned too much, %")
        axes.legend(frameon=False, labelcolor=colours["ink"])


if __name__ == "__main__":
    main()
