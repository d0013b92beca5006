"""`kenotron plot RUN [RUN…]`: the loss curves of runs from their metrics.jsonl, as a PNG or in the terminal.

kenotron plot logs/a logs/b                        in the terminal, over tokens
kenotron plot logs/a logs/b --output losses.png    a picture (needs matplotlib)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kenotron.config.errors import InputError, human_format, no_such_path
from kenotron.runs.logged import read_run
from kenotron.runs.summary import is_number

WIDTH, HEIGHT = 72, 18
MARKS = "*o+x#@%&"  # of the curves in a terminal


class Curve(NamedTuple):
    """A run's losses: training, and validation at its steps; each as (x, loss)."""

    name: str
    train: list[tuple[float, float]]
    val: list[tuple[float, float]]


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, such as logs/my_run, or metrics.jsonl files.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write a PNG (needs matplotlib).")] = None,
    steps: Annotated[bool, typer.Option("--steps", help="Plot over steps, not over tokens.")] = False,
) -> None:
    """Plot the training and validation losses of runs: in the terminal, or to a PNG file."""
    curves = [_curve(run, "iteration" if steps else "consumed_tokens") for run in runs]
    over = "steps" if steps else "tokens"
    if output is None:
        typer.echo("\n".join(_lines(curves, over)))
        return
    _draw(curves, over, output)
    typer.echo(f"Picture: {output}")


def _curve(run: Path, x: str) -> Curve:
    logged = read_run(run)

    def points(key: str) -> list[tuple[float, float]]:
        pairs = ((line[x], line.get(key)) for line in logged.steps.values())
        return [(float(at), float(loss)) for at, loss in pairs if is_number(at) and is_number(loss)]

    curve = Curve(logged.name, points("lm_loss"), points("val_loss"))
    if not curve.train:
        raise InputError(f"{run}: its metrics.jsonl has no losses yet")
    return curve


def _lines(curves: list[Curve], over: str) -> list[str]:
    """The curves as text; a column shows the mean of its steps."""
    everything = [point for curve in curves for point in (*curve.train, *curve.val)]
    right = max(x for x, _ in everything)
    left = min(x for x, _ in everything)
    rows: list[list[str]] = [[" "] * WIDTH for _ in range(HEIGHT)]
    columns: list[tuple[int, float, str]] = []
    for number, curve in enumerate(curves):
        means: dict[int, list[float]] = {}
        for x, loss in curve.train:
            means.setdefault(round((x - left) / ((right - left) or 1) * (WIDTH - 1)), []).append(loss)
        columns += [(at, sum(some) / len(some), MARKS[number % len(MARKS)]) for at, some in means.items()]
        columns += [(round((x - left) / ((right - left) or 1) * (WIDTH - 1)), loss, "v") for x, loss in curve.val]
    low, high = (pick(loss for _, loss, _ in columns) for pick in (min, max))
    for at, loss, mark in columns:
        rows[round((high - loss) / ((high - low) or 1) * (HEIGHT - 1))][at] = mark
    labels = {0: f"{high:.3g}", HEIGHT - 1: f"{low:.3g}"}
    found = [f"{labels.get(number, ''):>8} |{''.join(row).rstrip()}" for number, row in enumerate(rows)]
    found.append(f"{'':8} +{'-' * WIDTH}")
    end = f"{human_format(right)} {over}"
    found.append(f"{'':10}{human_format(left)}{end:>{WIDTH - len(human_format(left))}}")
    for number, curve in enumerate(curves):
        said = f", validation {curve.val[-1][1]:.4g} (v)" if curve.val else ""
        found.append(f"{MARKS[number % len(MARKS)]} {curve.name}: last loss {curve.train[-1][1]:.4g}{said}")
    return found


def _draw(curves: list[Curve], over: str, output: Path) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise InputError("--output: drawing needs matplotlib: pip install 'kenotron[plots]' (without it: the terminal)")
    if not output.absolute().parent.is_dir():
        raise no_such_path("--output", output.parent)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        colour = f"C{number % 10}"
        axes.plot(*zip(*curve.train), color=colour, linewidth=1, alpha=0.8, label=curve.name)
        if curve.val:
            axes.plot(*zip(*curve.val), "o", color=colour, markeredgecolor="black", label=f"{curve.name}, validation")
    axes.set(xlabel=over, ylabel="loss (nats a token)")
    losses = [loss for curve in curves for _, loss in curve.train]
    if max(losses) > 4 * min(losses) > 0:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human_format(x) if math.isfinite(x) else ""))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(output, dpi=150, format="png")
    except OSError as error:
        raise InputError(f"--output: cannot write {output}: {error.strerror}") from None
