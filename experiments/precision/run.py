"""What weights in bf16 cost, and what stochastic rounding gives back: `python experiments/precision/run.py`.

Two runs at a time, each on one core. Prints the validation loss of each way beside that of fp32 masters, seed by seed,
and draws it with `--draw docs/pictures/precision.svg`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
IN_BF16 = "optimizer.accumulate_grad_in_fp32=false"
WAYS = {
    "fp32 masters": (),
    "bf16, to the nearest": (IN_BF16,),
    "bf16, stochastic rounding": (IN_BF16, "optimizer.stochastic_rounding=true"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8, help="runs of each way (default: 8)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core (default: 2)")
    parser.add_argument("--draw", type=Path, help="an SVG to draw the validation losses in")
    parser.add_argument("overrides", nargs="*", help="keys of precision.yaml, such as tokens.train_steps=20")
    given = parser.parse_args()
    runs = [(way, seed) for seed in range(1, given.seeds + 1) for way in WAYS]
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        trained = pool.map(lambda each: train(*each, given.overrides, Path(folder)), runs)
        for number, ((way, seed), loss) in enumerate(zip(runs, trained, strict=True), start=1):
            found[way].append(loss)
            left = (time.monotonic() - started) / number * (len(runs) - number)
            print(f"{number} of {len(runs)}: {way}, seed {seed}: {loss:.4f}; ETA {left / 60:.0f} min", flush=True)
    print(table(found))
    if given.draw:
        draw(found, given.draw)


def train(way: str, seed: int, overrides: list[str], folder: Path) -> float:
    """The last validation loss of one run."""
    place = folder / f"{way}-{seed}".replace(" ", "-").replace(",", "")
    place.mkdir()
    changes = [f"general.seed={seed}", f"data_stages.0.data.seed={seed}", *WAYS[way], *overrides]
    command = [sys.executable, "-m", "kenotron", "train", str(HERE / "precision.yaml"), *changes]
    done = subprocess.run(command, cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    lines = (place / "logs" / "precision" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["val_loss"] for line in lines if "val_loss" in line][-1]


def table(found: dict[str, list[float]]) -> str:
    """Mean and standard deviation of each way, and its distance from the masters, seed by seed."""
    masters = found["fp32 masters"]
    lines = [
        "",
        f"| {len(masters)} seeds | validation loss | spread over seeds | beside fp32 masters |",
        "|---|---|---|---|",
    ]
    for way, losses in found.items():
        beside = [loss / other - 1 for loss, other in zip(losses, masters, strict=True)]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        ours = f"{statistics.mean(beside):+.2%} ({min(beside):+.2%} to {max(beside):+.2%})"
        lines.append(f"| {way} | {statistics.mean(losses):.4f} | {spread:.4f} | {ours if any(beside) else '–'} |")
    return "\n".join(lines)


def draw(found: dict[str, list[float]], path: Path) -> None:
    """A point for each run, a bar for each mean."""
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron"}  # the same file every time
    figure, axes = pyplot.subplots(figsize=(6, 2.2), layout="constrained")
    for row, losses in enumerate(reversed(found.values())):
        axes.plot(losses, [row] * len(losses), "o", alpha=0.6)
        axes.plot([statistics.mean(losses)], [row], "k|", markersize=22)
    axes.set_yticks(range(len(found)), list(reversed(found)))
    axes.set_ylim(-0.5, len(found) - 0.5)
    axes.set_xlabel("validation loss after the last step, one point a seed")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
