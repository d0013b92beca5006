"""The numbers of `speed.py` as JSON, as Markdown between two marker lines of a page, and as a picture.

python benchmarks/gpu/table.py benchmarks/results/gpu.json docs/benchmarks.md
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tables import replace_results

COLUMNS = (
    "| | tokens/s, best | median | ms a step | MFU | causal | of the matmuls | GiB | host, ms | kernels | start, s |"
)


def main() -> None:
    source, page = Path(sys.argv[1]), Path(sys.argv[2])
    replace_results(page, source.stem, markdown(json.loads(source.read_text())))


def write(record: dict[str, Any], path: Path) -> None:
    """Whole or not at all: a run may be cut at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)


def speeds(row: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second of the best turn and of the median one."""
    seconds = [turn["seconds"] for turn in row["turns"]]
    return row["tokens"] / min(seconds), row["tokens"] / statistics.median(seconds)


def summary(row: dict[str, Any]) -> str:
    """The speed of a row's last turn, or its problem."""
    return row["problem"] if "problem" in row else f"{row['tokens'] / row['turns'][-1]['seconds']:,.0f} tokens/s"


def by_case(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Case → its rows that had a turn, fastest first, then those with a problem."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        if row["turns"] or "problem" in row:
            cases.setdefault(row["case"], []).append(row)
    return {
        case: sorted(rows, key=lambda row: -speeds(row)[0] if row["turns"] else 0.0) for case, rows in cases.items()
    }


def markdown(record: dict[str, Any]) -> str:
    """A table for each case."""
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    ceiling = {dtype: f"{flops / 1e12:.3g}" for dtype, flops in record["ceiling"].items()}
    peak = f"; {record['vendor_peak'] / 1e12:.4g} by its data sheet" if record["vendor_peak"] else ""
    lines = [
        f"{record['date']} on {record['device']}: {ceiling['bfloat16']} TFLOP/s in bf16 products, {ceiling['float32']} "
        f"in fp32{peak}; {packages}."
    ]
    for case, rows in by_case(record).items():
        lines += ["", f"**{case}**", "", COLUMNS, "|---|" + "---:|" * (COLUMNS.count("|") - 2)]
        lines += [line(row, record) for row in rows]
    return "\n".join(lines) + "\n"


def line(row: dict[str, Any], record: dict[str, Any]) -> str:
    """One contender. Numbers other than times are those of its last turn."""
    name = f"**{row['contender']}**" if row["contender"].startswith("kenotron") else row["contender"]
    if not row["turns"]:
        return f"| {name} | {row['problem'].replace('|', '/')} |" + " |" * (COLUMNS.count("|") - 3)
    last, (best, median) = row["turns"][-1], speeds(row)
    peak = record["vendor_peak"]
    # A miniature computes in fp32; only its tables' form means something.
    ceiling = record["ceiling"]["float32" if record["miniature"] else "bfloat16"]
    cells = [
        f"{name} ({last['note']})" if last["note"] else name,
        f"{best:,.0f}",
        f"{median:,.0f}",
        f"{1000 * row['tokens'] / best:.4g}",
        f"{best * last['flops'] / peak:.1%}" if peak else "–",
        f"{best * last['flops_causal'] / peak:.1%}" if peak else "–",
        f"{best * last['flops'] / ceiling:.1%}",
        f"{last['peak_allocated'] / 2**30:.1f}" if "peak_allocated" in last else "–",
        f"{1000 * last['host_seconds']:.4g}" if "host_seconds" in last else "–",
        f"{last['kernels']:,}" if "kernels" in last else "–",
        f"{last['first_seconds']:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def draw(record: dict[str, Any], path: Path) -> None:
    """Tokens per second, a panel for each case. Needs matplotlib."""
    import draw as plots

    panels = {case: [row for row in rows if row["turns"]] for case, rows in by_case(record).items()}
    panels = {case: rows for case, rows in panels.items() if rows}
    height = sum(0.6 + 0.3 * len(rows) for rows in panels.values())
    figure, axes = plots.plt.subplots(len(panels), 1, figsize=(9, 0.6 + height), squeeze=False, layout="constrained")
    for panel, (case, rows) in zip(axes[:, 0], panels.items()):
        values = [speeds(row)[0] for row in rows]
        plots.bars(panel, [row["contender"] for row in rows], values, [f"{value:,.0f}" for value in values])
        panel.set_title(f"{case}: tokens/s", loc="left", color=plots.INK)
    figure.supxlabel(f"{record['device']} · torch {record['versions']['torch']} · {record['date']}", fontsize=8)
    figure.savefig(path, dpi=130)
    plots.plt.close(figure)


if __name__ == "__main__":
    main()
