"""Kénotron against its peers on this machine: speed, memory, start-up, side by side.

    python benchmarks/training.py                          everything: about an hour on two cores
    python benchmarks/training.py --sizes 17M --precisions bf16 --threads 1 --rounds 3
    python benchmarks/training.py --device cuda --sizes 135M

Makes `.venv-bench` with the peers on the first call. Prints a table for each row, writes
`benchmarks/results/<device>.json`, and draws it with `--picture docs/benchmarks.png`. docs/benchmarks.md describes the
method; tables.py writes the numbers into that page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import checkout  # noqa: E402
import environment  # noqa: E402
from race import Contender, race, result, start, warm_up  # noqa: E402
from work import SIZES, Work  # noqa: E402

PEERS = ("transformers", "transformers compiled", "Trainer", "litgpt", "litgpt compiled")
PEERS += ("picotron", "lingua", "lingua compiled")
OURS = ("kenotron", "kenotron compiled")
CEILING = "matmuls"
SPEED_BAR = {"fp32": 1.0, "bf16": 1.15}
MEMORY_BAR = 0.85
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-3}  # relative


def main() -> None:
    arguments = parse()
    python = environment.ensure()
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": environment.machine(),
        "versions": environment.versions(python),
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        for work in rows(arguments):
            row = measure(work, arguments, python, Path(scratch))
            record["rows"].append(row)
            show(row)
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nNumbers: {arguments.output}")
    if arguments.picture:
        subprocess.run([str(python), str(HERE / "draw.py"), str(arguments.output), str(arguments.picture)], check=True)
        print(f"Picture: {arguments.picture}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--precisions", nargs="+", choices=SPEED_BAR, default=list(SPEED_BAR))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--contenders", nargs="+", choices=(*PEERS, *OURS), default=[*PEERS, *OURS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-seconds", type=float, default=3.0, help="length of one turn of one contender")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile-cache", type=Path, help="keep compiled code here (default: compile afresh)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/<device>.json")
    parser.add_argument("--picture", type=Path, help="draw the numbers into this PNG")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also profile two steps of each contender")
    arguments = parser.parse_args()
    arguments.output = arguments.output or HERE / "results" / f"{arguments.device}.json"
    return arguments


def rows(arguments: argparse.Namespace) -> list[Work]:
    """Every combination that was asked for; threads matter on the CPU only."""
    threads = arguments.threads if arguments.device == "cpu" else [os.cpu_count() or 1]
    return [
        replace(SIZES[size], precision=precision, threads=count, device=arguments.device)
        for size in arguments.sizes
        for precision in arguments.precisions
        for count in threads
    ]


def measure(work: Work, arguments: argparse.Namespace, python: Path, scratch: Path) -> dict[str, Any]:
    """One row: start the contenders in turn, let them race, and check that they did the same work."""
    label = f"{work.name} {work.precision}, {work.threads} thread{'s' if work.threads > 1 else ''}"
    print(f"\n{label}: {work.parameters / 1e6:.1f}M parameters, {work.tokens} tokens a step", flush=True)
    folder = scratch / f"{work.name}-{work.precision}-{work.threads}"
    work.write(folder)
    cache = arguments.compile_cache or folder / "compiled"
    contenders: list[Contender] = []
    failures: dict[str, str] = {}
    try:
        for name in (CEILING, *arguments.contenders):
            need = work.state_bytes + 3 * 2**30
            if environment.available_memory() < need:
                failures[name] = f"left out: less than {need / 2**30:.0f} GiB of memory available"
            elif problem := checkout.missing(name):
                failures[name] = problem
            else:
                try:
                    contenders.append(start(name, python, work, folder, cache))
                    warm_up(contenders[-1], arguments.turn_seconds)
                    print(f"  {name}: first step after {contenders[-1].start_seconds:.1f} s", flush=True)
                except RuntimeError as error:
                    failures[name] = str(error)
            if name in failures:
                print(f"  {name}: {failures[name]}", flush=True)
        race(contenders, arguments.rounds, lambda text: print(text, flush=True))
        if arguments.profile:
            profile(contenders, arguments.profile / folder.name)
    finally:
        for contender in contenders:
            contender.close()
    ceiling = next((contender for contender in contenders if contender.name == CEILING), None)
    numbers = {contender.name: result(contender, work, ceiling) for contender in contenders}
    return {
        "label": label,
        "work": vars(work) | {"parameters": work.parameters},
        "contenders": numbers,
        "failures": failures,
        "verdicts": verdicts(numbers, work.precision),
    }


def profile(contenders: list[Contender], folder: Path) -> None:
    """Tables of the operations of two steps, a file for each contender."""
    folder.mkdir(parents=True, exist_ok=True)
    for contender in contenders:
        contender.ask(f"profile {folder.resolve() / contender.name.replace(' ', '-')}")
    print(f"  profiles: {folder}", flush=True)


def verdicts(numbers: dict[str, Any], precision: str) -> list[dict[str, Any]]:
    """The bars: ours against the best of the peers. `rounds`: least, median and greatest ratio of the rounds."""
    peers = [name for name in PEERS if name in numbers]
    ours = [name for name in OURS if name in numbers]
    if not peers or not ours:
        return []
    fastest = max(ours, key=lambda name: numbers[name]["tokens_per_sec"])
    rival = max(peers, key=lambda name: numbers[name]["tokens_per_sec"])
    ratios = [theirs / mine for theirs, mine in zip(numbers[rival]["step_seconds"], numbers[fastest]["step_seconds"])]
    leanest = min(peers, key=lambda name: numbers[name]["activation_bytes"])
    losses = [numbers[name]["first_loss"] for name in (*peers, *ours)]
    spread = (max(losses) - min(losses)) / abs(statistics.median(losses))
    found = [
        {
            "bar": f"speed ≥ {SPEED_BAR[precision]}x the best peer",
            "ours": fastest,
            "peer": rival,
            "ratio": numbers[fastest]["tokens_per_sec"] / numbers[rival]["tokens_per_sec"],
            "rounds": [min(ratios), statistics.median(ratios), max(ratios)],
        },
        *(
            {
                "bar": f"peak activation memory ≤ {MEMORY_BAR}x the leanest peer",
                "ours": name,
                "peer": leanest,
                "ratio": numbers[name]["activation_bytes"] / numbers[leanest]["activation_bytes"],
            }
            for name in ours
        ),
        {"bar": f"first losses agree to {LOSS_TOLERANCE[precision]:g}", "ratio": spread},
    ]
    limits = [SPEED_BAR[precision], *[MEMORY_BAR] * len(ours), LOSS_TOLERANCE[precision]]
    for index, (verdict, limit) in enumerate(zip(found, limits)):
        verdict["pass"] = verdict["ratio"] >= limit if index == 0 else verdict["ratio"] <= limit
    return found


def show(row: dict[str, Any]) -> None:
    """The row as a table, fastest first, then its bars."""
    numbers = row["contenders"]
    print(f"\n{row['label']}")
    header = ("", "tokens/s", "median", "of ceiling", "activations", "peak RSS", "first step", "loss 1")
    print("  {:24}{:>10}{:>10}{:>12}{:>13}{:>11}{:>12}{:>10}".format(*header))
    for name in sorted(numbers, key=lambda name: -numbers[name]["tokens_per_sec"]):
        n = numbers[name]
        text = f"  {name:24}{n['tokens_per_sec']:>10,.0f}{n['tokens_per_sec_median']:>10,.0f}"
        text += f"{n.get('ceiling_share', 0):>12.1%}"
        if "activation_bytes" in n:
            text += f"{n['activation_bytes'] / 2**20:>9,.0f} MiB{n['rss_peak_bytes'] / 2**20:>7,.0f} MiB"
            text += f"{n['start_seconds']:>10.1f} s{n['first_loss']:>10.5f}"
        print(text)
    for verdict in row["verdicts"]:
        span = "" if "rounds" not in verdict else " (rounds {:.2f} · {:.2f} · {:.2f})".format(*verdict["rounds"])
        who = f": {verdict['ours']} / {verdict['peer']}" if "peer" in verdict else ""
        print(f"  {'pass' if verdict['pass'] else 'FAIL'}  {verdict['bar']}{who} = {verdict['ratio']:.3g}{span}")


if __name__ == "__main__":
    main()
