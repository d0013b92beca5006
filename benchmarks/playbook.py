"""Plan the tables of docs/playbook.md anew: a quarter of an hour on two cores.

python benchmarks/playbook.py             # all
python benchmarks/playbook.py zero        # one

Each row is one plan; the first rank's memory, and the step of all.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kenotron.config import load  # noqa: E402
from kenotron.planner.hardware import GIB, GPUS  # noqa: E402
from kenotron.planner.memory import plan_memory  # noqa: E402
from kenotron.planner.speed import speed_of  # noqa: E402
from kenotron.planner.verdict import by_column  # noqa: E402

PAGE, GPU = ROOT / "docs" / "playbook.md", GPUS["h100"]
HEAD = (
    "GiB",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "ms",
    "tokens/s a GPU",
    "waits most for",
)


class Table(NamedTuple):
    """A model of examples/models with what its rows have in common, and the overrides of each row."""

    model: str
    common: str
    rows: tuple[str, ...]


TABLES = {
    "one": Table(
        "llama-3.2-1b",
        "parallelism.dp=1 optimizer.zero_stage=0 tokens.batch_accumulation_per_replica=4",
        (
            "tokens.micro_batch_size=1 parallelism.recompute_layer=false",
            "tokens.micro_batch_size=2 parallelism.recompute_layer=false",
            "tokens.micro_batch_size=4 parallelism.recompute_layer=false",
            "tokens.micro_batch_size=4 parallelism.recompute_layer=elementwise",
            "tokens.micro_batch_size=4 parallelism.recompute_layer=selective",
            "tokens.micro_batch_size=4 parallelism.recompute_layer=true",
        ),
    ),
    "zero": Table(
        "llama-3.1-8b",
        "parallelism.dp=8 parallelism.recompute_layer=selective tokens.batch_accumulation_per_replica=4",
        tuple(f"optimizer.zero_stage={stage}" for stage in range(4)),
    ),
    "tp": Table(
        "llama-3.1-8b",
        "parallelism.dp=1 parallelism.recompute_layer=selective tokens.batch_accumulation_per_replica=4",
        (
            "parallelism.tp=2 parallelism.tp_mode=ALL_REDUCE",
            "parallelism.tp=8 parallelism.tp_mode=ALL_REDUCE",
            "parallelism.tp=2 parallelism.tp_mode=REDUCE_SCATTER",
            "parallelism.tp=8 parallelism.tp_mode=REDUCE_SCATTER",
        ),
    ),
    "cp": Table(
        "llama-3.1-8b",
        "parallelism.dp=1 parallelism.context_parallel_size=8 optimizer.zero_stage=3 parallelism.recompute_layer=true "
        "tokens.sequence_length=131072 tokens.batch_accumulation_per_replica=1",
        tuple(f"parallelism.context_parallel_method={method}" for method in ("ring", "allgather", "ulysses")),
    ),
    "pp": Table(
        "llama-3.1-8b",
        "parallelism.dp=2 parallelism.pp=4 optimizer.zero_stage=1 parallelism.recompute_layer=selective "
        "tokens.batch_accumulation_per_replica=16",
        tuple(
            f"parallelism.pp_engine={engine}"
            for engine in (
                "afab",
                "1f1b",
                "interleaved_1f1b",
                "interleaved_zero_bubble",
                "zbv_zero_bubble",
                "dualpipev",
            )
        ),
    ),
    "ep": Table(
        "mixtral-8x7b",
        "parallelism.dp=64 parallelism.recompute_layer=selective tokens.batch_accumulation_per_replica=4",
        (
            "optimizer.zero_stage=3",
            "optimizer.zero_stage=1 parallelism.expert_parallel_size=8",
            "optimizer.zero_stage=3 parallelism.expert_parallel_size=8",
        ),
    ),
}


def planned(table: Table, row: str) -> str:
    """A row of the table."""
    config = load(ROOT / "examples" / "models" / f"{table.model}.yaml", [*table.common.split(), *row.split()])
    plans = plan_memory(config, GPU)
    speed = speed_of(config, GPU, plans)
    weights, gradients, optimizer, activations, _, communication, _ = by_column(plans[0].peak.of)
    sizes = (plans[0].peak.bytes, weights, gradients, optimizer, activations, communication)
    waits = {name.removeprefix("waits for "): each for name, each in speed.ranks[0].of.items() if "waits" in name}
    most = max(waits, key=waits.__getitem__, default="")
    share = waits.get(most, 0.0) / speed.seconds
    words = " ".join(f"`{override.split('.')[-1]}`" for override in row.split())
    cells = [f"{size / GIB:.1f}" for size in sizes] + [f"{1000 * speed.seconds:,.0f}", f"{speed.of_a_gpu:,.0f}"]
    return f"| {words} | {' | '.join(cells)} | {f'{most}, {share:.0%}' if share >= 0.005 else '–'} |\n"


def lines(table: Table) -> str:
    """The table in Markdown."""
    head = f"| | {' | '.join(HEAD)} |\n|---|{'---:|' * (len(HEAD) - 1)}---|\n"
    return head + "".join(planned(table, row) for row in table.rows)


def main() -> None:
    """Plan the tables of the arguments, or all, and write them into the page."""
    for name in sys.argv[1:] or TABLES:
        made = lines(TABLES[name])
        print(name, made, sep="\n", flush=True)
        text = PAGE.read_text()
        between = re.compile(rf"(<!-- planned: {name} -->\n\n)[^<]*(<!-- end -->)", re.DOTALL)
        PAGE.write_text(between.sub(lambda found: found[1] + made + "\n" + found[2], text))  # noqa: B023


if __name__ == "__main__":
    main()
