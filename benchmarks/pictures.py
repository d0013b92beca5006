"""The pictures of the README, from real runs: `make pictures` (about half an hour on two cores).

    python benchmarks/pictures.py                     runs what is missing below --runs, then draws into docs/pictures
    python benchmarks/pictures.py --only terminal     curves or terminal

curves     the loss of one run on eight layouts, and bits per byte of `make train` beside gzip's and xz's
terminal   a run that is killed and resumed, and one that is not: what the commands print

`diagrams.py` draws those that need no long run.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
STEPS = 120
# Name in the picture, and what the layout adds to the same file. The global batch is 16 sequences on all.
LAYOUTS = {
    "1 process": [],
    "dp 2": ["parallelism.dp=2", "tokens.micro_batch_size=8"],
    "dp 2, ZeRO 3": ["parallelism.dp=2", "tokens.micro_batch_size=8", "optimizer.zero_stage=3"],
    "tp 2": ["parallelism.tp=2"],
    "pp 2": ["parallelism.pp=2", "tokens.micro_batch_size=4", "tokens.batch_accumulation_per_replica=4"],
    "cp 2, ring": ["parallelism.context_parallel_size=2"],
    "dp 2 x tp 2": ["parallelism.dp=2", "parallelism.tp=2", "tokens.micro_batch_size=8"],
    "pp 2 x tp 2": [
        "parallelism.pp=2",
        "parallelism.tp=2",
        "tokens.micro_batch_size=4",
        "tokens.batch_accumulation_per_replica=4",
    ],
}


def kenotron(*arguments: str, folder: Path) -> str:
    """What ``kenotron <arguments>`` prints in `folder`; its end is an error if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "kenotron", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"kenotron {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; empty where there is none."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(name: str, steps: int, overrides: list[str], folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run of the quickstart in `folder`, trained now unless they are there."""
    found = metrics(folder / "logs" / name)
    if len(found) == steps:
        return found
    print(f"training {name}: {steps} steps", flush=True)
    keys = [
        f"general.run={name}",
        f"checkpoints.checkpoints_path=checkpoints/{name}",
        f"tokens.train_steps={steps}",
        "checkpoints.checkpoint_interval=100000",
        "logging.tensorboard=false",
        "logging.sample_prompts=[]",
        *overrides,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    said = kenotron("train", str(QUICKSTART), *keys, folder=folder)
    (folder / "logs" / name / "output").write_text(said)
    return metrics(folder / "logs" / name)


# ---- curves ------------------------------------------------------------------------------------------------

THEMES = {
    "light": {"ink": "#1f2328", "quiet": "#59636e", "grid": "#d1d9e0", "paper": "#ffffff", "line": "#0969da"},
    "dark": {"ink": "#f0f6fc", "quiet": "#9198a1", "grid": "#3d444d", "paper": "#0d1117", "line": "#58a6ff"},
}
COLOURS = ["#d1495b", "#edae49", "#66a182", "#2e86ab", "#8d5a97", "#e07a3f", "#4f9d9d", "#777777"]


@contextmanager
def drawing(file: Path, colours: dict[str, str], size: tuple[float, float]) -> Iterator[Any]:
    """A figure of matplotlib in the colours of a theme, written to `file` at the end; the same bytes every time."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kenotron",
        "font.family": "sans-serif",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": colours["grid"],
        "axes.labelcolor": colours["quiet"],
        "axes.titlecolor": colours["ink"],
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "text.color": colours["ink"],
        "xtick.color": colours["quiet"],
        "ytick.color": colours["quiet"],
        "figure.facecolor": colours["paper"],
        "axes.facecolor": colours["paper"],
        "savefig.facecolor": colours["paper"],
    }
    with pyplot.rc_context(style):
        figure = pyplot.figure(figsize=size, layout="constrained")
        yield figure
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)
    print(f"wrote {file}")


def curves(runs: Path, out: Path) -> None:
    """The loss on eight layouts and its largest difference; bits per byte of the quickstart, gzip's and xz's."""
    short = ["tokens.val_check_interval=-1", "optimizer.learning_rate_scheduler.lr_decay_starting_step=40"]
    losses = {
        name: [line["lm_loss"] for line in run(re.sub(r"\W+", "-", name), STEPS, [*short, *layout], runs)]
        for name, layout in LAYOUTS.items()
    }
    whole = run("quickstart", 1000, ["tokens.val_check_interval=50"], runs)
    texts = of_compressors()
    for theme, colours in THEMES.items():
        draw_curves(losses, whole, texts, colours, out / f"curves-{theme}.svg")


def of_compressors() -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz -9` on the text that the quickstart validates on: file by file, and all."""
    from kenotron.config import load
    from kenotron.text.file_documents import python_stdlib
    from kenotron.text.hash_split import hash_threshold, is_held_out

    limit = hash_threshold(python_stdlib().documents(), load(QUICKSTART).tokens.val_fraction)
    texts = [piece.text.encode() for piece in python_stdlib().documents() if is_held_out(piece.text, limit)]
    packed = {
        "gzip": sum(len(gzip.compress(text)) for text in texts),
        "xz": len(lzma.compress(b"".join(texts), preset=9)),
    }
    return {name: 8 * size / sum(map(len, texts)) for name, size in packed.items()}


def draw_curves(
    losses: dict[str, list[float]],
    whole: list[dict[str, Any]],
    texts: dict[str, float],
    colours: dict[str, str],
    file: Path,
) -> None:
    """One theme of the picture."""
    with drawing(file, colours, (10, 4.2)) as figure:
        grid = figure.add_gridspec(2, 2, height_ratios=(3, 1))
        top, below, right = (figure.add_subplot(at) for at in (grid[0, 0], grid[1, 0], grid[:, 1]))

        reference = losses["1 process"]
        steps = range(1, len(reference) + 1)
        for number, (name, values) in enumerate(losses.items()):  # thick to thin: all of them are seen
            width = 1.2 + 1.5 * (len(losses) - 1 - number)
            top.plot(steps, values, color=COLOURS[number], linewidth=width, label=name, solid_capstyle="round")
        top.set_title("Loss of one run on eight layouts, on top of each other")
        top.legend(frameon=False, ncols=2, labelcolor=colours["quiet"], fontsize=9)
        top.tick_params(labelbottom=False)
        for number, (name, values) in enumerate(losses.items()):
            if name != "1 process":
                apart = [max(abs(a - b) / b, 1e-9) for a, b in zip(values, reference)]
                below.plot(steps, apart, color=COLOURS[number], linewidth=0.8)
        below.set_yscale("log")
        below.set_ylim(1e-8, 1e-3)
        below.set_yticks([1e-8, 1e-6, 1e-4], ["1e-8", "1e-6", "1e-4"])
        below.minorticks_off()
        below.set_ylabel("relative\ndifference")
        below.set_xlabel("step")

        points = [(line["iteration"], line["val_bits_per_byte"]) for line in whole if "val_bits_per_byte" in line]
        right.plot(*zip(*points), color=colours["line"], linewidth=2.2)
        right.annotate(
            f"{points[-1][1]:.2f}", points[-1], (-4, -14), textcoords="offset points", color=colours["line"], ha="right"
        )
        for key, value in texts.items():
            right.axhline(value, color=colours["quiet"], linewidth=1, linestyle=(0, (4, 3)))
            right.annotate(f"{key} -9  {value:.2f}", (1000, value), (0, 3), textcoords="offset points", ha="right")
        right.set_title("make train: bits per byte of Python files it has never seen")
        right.set_xlabel("step")
        right.set_ylim(bottom=1.0)


# ---- terminal ----------------------------------------------------------------------------------------------


SHORT = {
    "tokens": {"train_steps": 60, "micro_batch_size": 4, "val_check_interval": -1, "limit_val_batches": 0},
    "checkpoints": {"checkpoint_interval": 20},
    "logging": {"sample_prompts": [], "tensorboard": False},
}
KILLED_AFTER = 47
WIDTH = 100


def terminal(runs: Path, out: Path) -> None:
    """A run that is killed by SIGKILL and resumed ends with the bytes of one that is not: commands and their output."""
    folder = runs / "terminal"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = yaml.safe_load(QUICKSTART.read_text())
    for section, keys in SHORT.items():
        config[section] |= keys
    config["optimizer"]["learning_rate_scheduler"]["lr_decay_starting_step"] = 40
    for name in ("killed", "whole"):
        config["general"]["run"] = config["checkpoints"]["checkpoints_path"] = name
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))

    first = until_killed(folder)
    again = kenotron("train", "killed.yaml", folder=folder)
    kenotron("train", "whole.yaml", folder=folder)
    compared = kenotron("compare", "logs/killed", "logs/whole", folder=folder).splitlines()
    (file,) = (folder / "killed" / "60" / "model").glob("*.safetensors")
    shell = f"cmp killed/60/model/{file.name} whole/60/model/{file.name} && echo same bytes"
    same = subprocess.run(shell, shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout
    shown = [
        "$ kenotron train killed.yaml &",
        *those(first, "Training from", "step", "Saved"),
        "$ kill -9 %1",
        "$ kenotron train killed.yaml        # the same command again",
        *those(again, "Loaded", "step", "Saved"),
        "$ kenotron train whole.yaml         # the same run without a kill: …",
        "$ kenotron compare logs/killed logs/whole",
        *[line for line in compared if line.startswith("lm_loss")],
        f"$ {shell}",
        *same.splitlines(),
    ]
    (out / "terminal.svg").write_text(svg_of(shown))
    print(f"wrote {out / 'terminal.svg'}")


def until_killed(folder: Path) -> str:
    """What the run prints until it is killed, after its step KILLED_AFTER."""
    log = folder / "output"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "kenotron", "train", "killed.yaml"],
            cwd=folder,
            stdout=stream,
            start_new_session=True,
        )
        while len(metrics(folder / "logs" / "killed")) < KILLED_AFTER:
            if process.poll() is not None:
                raise SystemExit(f"the run ended before it could be killed:\n{log.read_text()[-2000:]}")
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return log.read_text()


def those(output: str, *starts: str) -> list[str]:
    """The lines that begin so."""
    return [line for line in output.splitlines() if line.startswith(starts)]


def svg_of(lines: list[str]) -> str:
    """A terminal that shows `lines`; commands begin with $."""
    rows = []
    for number, line in enumerate(lines):
        text = line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
        command, mark, comment = text.partition("  #") if text.startswith("$") else (text, "", "")
        kind = "command" if text.startswith("$") else "line"
        note = f'<tspan class="note">{html.escape(mark + comment)}</tspan>'
        rows.append(f'<text class="{kind}" x="20" y="{56 + 20 * number}">{html.escape(command)}{note}</text>')
    height = 56 + 20 * len(lines)
    dots = "".join(f'<circle cx="{22 + 20 * i}" cy="20" r="6" fill="{c}"/>' for i, c in enumerate(COLOURS[:3]))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 {height}" role="img">
<title>A run that is killed and resumed has the losses and the weights of one that is not, byte for byte</title>
<style>
text {{ font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre; }}
.command {{ fill: #f0f6fc; font-weight: 600; }} .line {{ fill: #b7bfc8; }} .note {{ fill: #7ee787; font-weight: 400; }}
</style>
<rect width="880" height="{height}" rx="10" fill="#161b22"/>
{dots}
{chr(10).join(rows)}
</svg>
"""


DRAWN: dict[str, Callable[[Path, Path], None]] = {
    "curves": curves,
    "terminal": terminal,
}


def draw_chosen(parser: argparse.ArgumentParser, drawn: Mapping[str, Callable[..., None]], *before: str) -> None:
    """Draw the pictures that the command line asks for, each into a folder, with the options `before` it."""
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", choices=drawn)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, draw in drawn.items():
        if given.only in (None, name):
            draw(*(getattr(given, option).absolute() for option in before), given.out)


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "pictures", help="folder of the runs, kept")
    draw_chosen(parser, DRAWN, "runs")


if __name__ == "__main__":
    main()
