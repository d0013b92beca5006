"""Writes the numbers of `training.py` into a page, as Markdown, between two marker lines.

python benchmarks/tables.py benchmarks/results/cpu.json docs/benchmarks.md

<!-- results: cpu -->
… everything here is replaced …
<!-- end of results -->
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    source, page = Path(sys.argv[1]), Path(sys.argv[2])
    replace_results(page, source.stem, markdown(json.loads(source.read_text())))


def replace_results(page: Path, name: str, results: str) -> None:
    """Write `results` between the page's two marker lines of this name."""
    begin, end = f"<!-- results: {name} -->", "<!-- end of results -->"
    text = page.read_text()
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        sys.exit(f"{page}: no line '{begin}' with '{end}' after it")
    page.write_text(pattern.sub(lambda _: f"{begin}\n\n{results}\n{end}", text))


def markdown(record: dict[str, Any]) -> str:
    machine, versions = record["machine"], record["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"{record['date']} on {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB "
        f"({machine['instructions']}), {machine['system']}; {packages}.",
        "",
        *bars(record["rows"]),
    ]
    for row in record["rows"]:
        lines += ["", *table(row)]
    return "\n".join(lines) + "\n"


def bars(rows: list[dict[str, Any]]) -> list[str]:
    """One line a row and bar."""
    lines = ["| row | bar | ours | peer | ratio | |", "|---|---|---|---|---:|---|"]
    for row in rows:
        for verdict in row["verdicts"]:
            ours, peer = verdict.get("ours", ""), verdict.get("peer", "")
            ratio = f"{verdict['ratio']:.2f}" if peer else f"{verdict['ratio']:.1e}"
            passed = "pass" if verdict["pass"] else "**fail**"
            lines.append(f"| {row['label']} | {verdict['bar']} | {ours} | {peer} | {ratio} | {passed} |")
    return lines


def table(row: dict[str, Any]) -> list[str]:
    """All contenders of one row, fastest first."""
    lines = [
        f"**{row['label']}**",
        "",
        "| | tokens/s, best | median | of the matmuls | activations at peak, MiB | peak RSS, MiB | first step, s |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, n in sorted(row["contenders"].items(), key=lambda item: -item[1]["tokens_per_sec"]):
        shown = f"**{name}**" if name.startswith("kenotron") else name
        cells = [shown, f"{n['tokens_per_sec']:,.0f}", f"{n['tokens_per_sec_median']:,.0f}"]
        cells.append(f"{n['ceiling_share']:.0%}" if "ceiling_share" in n else "")
        if "activation_bytes" in n:
            cells += [f"{n['activation_bytes'] / 2**20:,.0f}", f"{n['rss_peak_bytes'] / 2**20:,.0f}"]
            cells.append(f"{n['start_seconds']:.1f}")
        else:
            cells += ["", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    for name, reason in row["failures"].items():
        lines += ["", f"{name}: {reason.splitlines()[0]}"]
    return lines


if __name__ == "__main__":
    main()
