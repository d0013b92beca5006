"""Draws the numbers of `training.py`: one panel a row for speed, one for memory.

python benchmarks/draw.py benchmarks/results/cpu.json docs/benchmarks.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, THEIRS, INK, FAINT = "#d1495b", "#8d99ae", "#2b2d42", "#c9ced8"
ORDER = (
    "kenotron compiled",
    "kenotron",
    "litgpt compiled",
    "litgpt",
    "Trainer",
    "transformers compiled",
    "transformers",
    "lingua compiled",
    "lingua",
    "picotron",
)


def main() -> None:
    record = json.loads(Path(sys.argv[1]).read_text())
    rows = record["rows"]
    plt.rcParams.update({"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(10, 0.6 + 2.0 * len(rows)), squeeze=False, width_ratios=[3, 2], layout="constrained"
    )
    for (speed, memory), row in zip(axes, rows):
        names = [name for name in ORDER if name in row["contenders"]]
        numbers = [row["contenders"][name] for name in names]
        draw_speed(speed, row, names, numbers)
        draw_memory(memory, names, numbers)
    axes[0][1].set_title("activation memory at the peak, MiB", loc="left", color=INK)
    machine, versions = record["machine"], record["versions"]
    figure.supxlabel(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['instructions']} · torch {versions['torch']}, "
        f"transformers {versions['transformers']}, litgpt {versions['litgpt']} · {record['date']}",
        fontsize=8,
        color=INK,
    )
    figure.savefig(sys.argv[2], dpi=130)


def draw_speed(axes: Axes, row: dict[str, Any], names: list[str], numbers: list[dict[str, Any]]) -> None:
    values = [n["tokens_per_sec"] for n in numbers]
    bars(axes, names, values, [f"{v:,.0f}  ({n.get('ceiling_share', 0):.0%})" for v, n in zip(values, numbers)])
    axes.set_title(f"{row['label']}: tokens/s (share of bare matmuls)", loc="left", color=INK)


def draw_memory(axes: Axes, names: list[str], numbers: list[dict[str, Any]]) -> None:
    values = [n["activation_bytes"] / 2**20 for n in numbers]
    bars(axes, names, values, [f"{v:,.0f}" for v in values])
    axes.set_yticklabels([])


def bars(axes: Axes, names: list[str], values: list[float], labels: list[str]) -> None:
    positions = range(len(names) - 1, -1, -1)
    colors = [OURS if name.startswith("kenotron") else THEIRS for name in names]
    drawn = axes.barh(list(positions), values, color=colors, height=0.72)
    axes.bar_label(drawn, labels, padding=3, fontsize=8, color=INK)
    axes.set_yticks(list(positions), names)
    axes.set_xlim(0, max(values) * 1.3)
    axes.tick_params(length=0, labelbottom=False, colors=INK)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.axvline(0, color=FAINT, linewidth=1)


if __name__ == "__main__":
    main()
