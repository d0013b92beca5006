"""`kenotron plot RUN [RUN…]`: the loss curves of runs from their metrics.jsonl, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kenotron.config.errors import InputError, human_format
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
    steps: Annotated[bool, typer.Option("--steps", help="Plot over steps, not over tokens.")] = False,
) -> None:
    """Plot the training and validation losses of runs in the terminal (`kenotron report`: on a page)."""
    curves = [_curve(run, "iteration" if steps else "consumed_tokens") for run in runs]
    typer.echo("\n".join(_lines(curves, "steps" if steps else "tokens")))


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
