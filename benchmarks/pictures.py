"""The pictures of the README, from real runs: `make pictures` (about half an hour on two cores).

    python benchmarks/pictures.py                     runs what is missing below --runs, then draws into docs/pictures
    python benchmarks/pictures.py --only terminal     one of curves, terminal, schedules, badges

curves     the loss of one run on eight layouts, and bits per byte of `make train` beside gzip's and xz's
terminal   a run that is killed and resumed, and one that is not: what the commands print
schedules  pipeline schedules, as torch orders the work of their ranks
badges     license and versions of Python, as pyproject.toml has them
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
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
    said = (runs / "logs" / "quickstart" / "output").read_text()
    texts = {name: float(value) for name, value in re.findall(r"(\w+)_bits_per_byte: ([\d.]+)", said) if name != "val"}
    for theme, colours in THEMES.items():
        draw_curves(losses, whole, texts, colours, out / f"curves-{theme}.svg")


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


# ---- pipeline schedules ------------------------------------------------------------------------------------

RANKS, MICRO_BATCHES = 4, 8
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # backward is twice the work: of inputs and of weights
WORK = {
    "F": ("#2e86ab", "forward"),
    "B": ("#66a182", "backward"),
    "I": ("#66a182", ""),
    "W": ("#edae49", "weights alone"),
}


def schedules(runs: Path, out: Path) -> None:
    """What every rank does when, by the schedules that `parallelism.pp_engine` names."""
    from kenotron.parallel.pipeline import SCHEDULES

    orders = {name: order_of(SCHEDULES[name]) for name in ("afab", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")}
    for theme, colours in THEMES.items():
        draw_schedules(orders, colours, out / f"schedules-{theme}.svg")


Span = tuple[int, float, float, str, int, int]
"""Rank, start, length, kind of work, micro-batch, chunk of the rank's layers."""


def one_part(rank: int, warm_up: int) -> list[tuple[int, str, int]]:
    """Stage, kind and micro-batch as torch does them where a rank has one part: in turn after `warm_up` forwards."""
    forwards = [(rank, "F", number) for number in range(MICRO_BATCHES)]
    backwards = [(rank, "B", number) for number in range(MICRO_BATCHES)]
    steady = [work for pair in zip(backwards, forwards[warm_up:]) for work in pair]
    return forwards[:warm_up] + steady + backwards[MICRO_BATCHES - warm_up :]


def order_of(schedule: type) -> list[Span]:
    """The work of all ranks, each piece as early as its rank and what it waits for allow."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    chunks = 2 if issubclass(schedule, PipelineScheduleMulti) else 1
    if chunks == 1:
        rows = [
            one_part(rank, MICRO_BATCHES if schedule.__name__ == "ScheduleGPipe" else RANKS - rank)
            for rank in range(RANKS)
        ]
    else:
        found = [map(repr, row) for row in get_schedule_ops(schedule, RANKS, MICRO_BATCHES, chunks)]
        parts = [[re.fullmatch(r"(\d+)([FBIW])(\d+)", each) for each in row] for row in found]
        rows = [[(int(each[1]), each[2], int(each[3])) for each in row if each] for row in parts]
    last = RANKS * chunks - 1
    done: dict[tuple[int, str, int], float] = {}
    free, spans = [0.0] * RANKS, list[Span]()
    while any(rows):
        before = len(spans)
        for rank, row in enumerate(rows):
            while row:
                stage, kind, micro_batch = row[0]
                needs = [(stage, "F", micro_batch)] if kind in "BI" else []
                if kind == "F" and stage > 0:
                    needs = [(stage - 1, "F", micro_batch)]
                elif kind in "BI" and stage < last:
                    needs.append((stage + 1, "I", micro_batch))
                if not all(need in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                length = COSTS[kind] / chunks
                free[rank] = start + length
                done[stage, "I" if kind in "BI" else kind, micro_batch] = free[rank]
                spans.append((rank, start, length, kind, micro_batch, stage // RANKS))
                row.pop(0)
        assert len(spans) > before, "every rank waits for another"
    return spans


def draw_schedules(orders: dict[str, list[Span]], colours: dict[str, str], file: Path) -> None:
    """One theme of the picture."""
    ideal = 3 * MICRO_BATCHES
    longest = max(start + length for spans in orders.values() for _, start, length, *_ in spans)
    with drawing(file, colours, (10, 6.4)) as figure:
        for axes, (name, spans) in zip(figure.subplots(len(orders), 1, sharex=True), orders.items()):
            end = max(start + length for _, start, length, *_ in spans)
            for rank, start, length, kind, micro_batch, chunk in spans:
                axes.barh(
                    rank,
                    length,
                    0.86,
                    start,
                    color=WORK[kind][0],
                    alpha=0.6 if chunk else 1.0,
                    edgecolor=colours["paper"],
                )
                if length >= 1:
                    axes.text(
                        start + length / 2, rank, micro_batch, ha="center", va="center", fontsize=8, color="white"
                    )
            axes.set_title(f"{name}: {1 - ideal / end:.0%} of the time is waiting")
            axes.set_xlim(0, longest)
            axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
            axes.invert_yaxis()
            axes.tick_params(length=0, labelbottom=False)
            for side in axes.spines.values():
                side.set_visible(False)
        from matplotlib.patches import Patch

        shown = [Patch(color=colour, label=label) for colour, label in WORK.values() if label]
        shown.append(Patch(color="#2e86ab", alpha=0.6, label="lighter: the rank's second part of the layers"))
        figure.legend(handles=shown, loc="outside lower left", ncols=4, frameon=False, labelcolor=colours["quiet"])


# ---- badges ------------------------------------------------------------------------------------------------


def badges(runs: Path, out: Path) -> None:
    """License and Python versions, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: \d", each)]
    for name, value in {"license": project["license"], "python": f"{versions[0]} to {versions[-1]}"}.items():
        (out / f"{name}.svg").write_text(badge(name, value))
        print(f"wrote {out / name}.svg")


def badge(name: str, value: str) -> str:
    """Two fields, grey and blue."""
    left, right = 12 + 7 * len(name), 12 + 7 * len(value)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">
<title>{name}: {value}</title>
<rect width="{left + right}" height="20" rx="3" fill="#555"/>
<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z" fill="#0b62a8"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{left / 2}" y="14">{name}</text><text x="{left + right / 2}" y="14">{value}</text>
</g>
</svg>
"""


DRAWN: dict[str, Callable[[Path, Path], None]] = {
    "curves": curves,
    "terminal": terminal,
    "schedules": schedules,
    "badges": badges,
}


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "pictures", help="folder of the runs, kept")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", choices=DRAWN)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        if given.only in (None, name):
            draw(given.runs.absolute(), given.out)


if __name__ == "__main__":
    main()
