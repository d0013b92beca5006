"""Whether a learning rate found at width 64 is the best one at width 256: `python experiments/transfer/run.py`.

Two runs at a time, each on one core: a grid of rates at either width, under µP and under the standard parametrization,
and one rate at depth 8 under CompleteP and the standard one. Prints the tables of docs/transfer.md, and draws its
picture with `--draw docs/pictures/transfer.svg`.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy

HERE = Path(__file__).resolve().parent
SHAPES = "model.model_config"
STANDARD = "model.parametrization=null"
WIDE = (f"{SHAPES}.hidden_size=256", f"{SHAPES}.intermediate_size=768") + tuple(
    f"{SHAPES}.{heads}=16" for heads in ("num_attention_heads", "num_key_value_heads")
)
DEEP = (f"{SHAPES}.num_hidden_layers=8",)
FOUND = -7.5  # log2 of the learning rate of transfer.yaml, about the best one at width 64
RATES = [FOUND + steps / 2 for steps in range(-2, 3)]
BASE = "width 64, depth 2"
WAYS = {  # overrides, and log2 of the learning rates
    BASE: ((), RATES),
    "width 256, µP": (WIDE, RATES),
    "width 256, standard": ((*WIDE, STANDARD), [rate - 1.5 for rate in RATES]),
    "depth 8, CompleteP": ((*DEEP, "model.parametrization.kind=completep"), [FOUND]),
    "depth 8, standard": ((*DEEP, STANDARD), [FOUND]),
}

Found = dict[str, dict[float, list[float]]]  # way → log2 of the rate → loss of each seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way and rate (default: 3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core (default: 2)")
    parser.add_argument("--draw", type=Path, help="an SVG to draw the validation losses in")
    parser.add_argument("overrides", nargs="*", help="keys of transfer.yaml, such as tokens.train_steps=20")
    given = parser.parse_args()
    runs = [(way, rate, seed) for seed in range(1, given.seeds + 1) for way in WAYS for rate in WAYS[way][1]]
    found: Found = {way: {rate: [] for rate in rates} for way, (_, rates) in WAYS.items()}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        trained = pool.map(lambda each: train(*each, given.overrides, Path(folder)), runs)
        for number, ((way, rate, seed), loss) in enumerate(zip(runs, trained, strict=True), start=1):
            found[way][rate].append(loss)
            left = (time.monotonic() - started) / number * (len(runs) - number)
            said = f"{way}, rate 2^{rate}, seed {seed}: {loss:.4f}"
            print(f"{number} of {len(runs)}: {said}; ETA {left / 60:.0f} min", flush=True)
    print("\n".join(["", *widths(found), "", *depths(found)]))
    if given.draw:
        draw(found, given.draw)


def train(way: str, rate: float, seed: int, overrides: list[str], folder: Path) -> float:
    """The last validation loss of one run; `rate` is log2 of its learning rate."""
    place = folder / f"{way}-{rate}-{seed}".replace(" ", "-").replace(",", "")
    place.mkdir()
    changes = [f"general.seed={seed}", f"data_stages.0.data.seed={seed}", *WAYS[way][0], *overrides]
    changes.append(f"optimizer.learning_rate_scheduler.learning_rate={2**rate}")
    command = [sys.executable, "-m", "kenotron", "train", str(HERE / "transfer.yaml"), *changes]
    done = subprocess.run(command, cwd=place, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    lines = (place / "logs" / "transfer" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["val_loss"] for line in lines if "val_loss" in line][-1]


def best(losses: dict[float, list[float]]) -> tuple[float, float]:
    """(log2 of the rate, loss) of the minimum of the parabola through the means of the seeds."""
    bend, slope, height = numpy.polyfit([*losses], [statistics.mean(each) for each in losses.values()], 2)
    return -slope / (2 * bend), height - slope**2 / (4 * bend)


def each_seed(losses: dict[float, list[float]]) -> list[dict[float, list[float]]]:
    return [{rate: [loss] for rate, loss in zip(losses, each)} for each in zip(*losses.values())]


def widths(found: Found) -> Iterator[str]:
    """The best rate of each way beside that of the small model, and its loss."""
    yield f"| mean of {len(found[BASE][FOUND])} seeds | best rate | shift, octaves | of each seed | loss there |"
    yield "|---|---|---|---|---|"
    small = best(found[BASE])[0]
    for way in list(WAYS)[:3]:
        at, lowest = best(found[way])
        pairs = zip(each_seed(found[way]), each_seed(found[BASE]))
        shifts = ", ".join(f"{best(one)[0] - best(other)[0]:+.2f}" for one, other in pairs)
        shown = "– | –" if way == BASE else f"{at - small:+.2f} | {shifts}"
        yield f"| {way} | 2^{at:.2f} | {shown} | {lowest:.2f} |"


def depths(found: Found) -> Iterator[str]:
    """The loss of the deep model at the rate of the shallow one."""
    yield f"| learning rate 2^{FOUND} | loss | of each seed |"
    yield "|---|---|---|"
    for way in (BASE, *list(WAYS)[3:]):
        losses = found[way][FOUND]
        yield f"| {way} | {statistics.mean(losses):.2f} | {', '.join(f'{loss:.2f}' for loss in losses)} |"


def draw(found: Found, path: Path) -> None:
    """The losses over the rates at both widths: a line for the mean of the seeds, a point for each, a triangle for the
    best rate."""
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kenotron"}  # the same file every time
    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    for number, way in enumerate(list(WAYS)[:3]):
        colour, rates = f"C{number}", [2**rate for rate in found[way]]
        axes.plot(rates, [statistics.mean(each) for each in found[way].values()], color=colour, label=way)
        axes.plot(rates, [*found[way].values()], ".", color=colour, alpha=0.5)
        at, lowest = best(found[way])
        axes.plot([2**at], [lowest], "v", color=colour, markeredgecolor="black")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="learning rate", ylabel="validation loss")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
