"""Draw the losses of runs over tokens with characters."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, human_format
from kenotron.runs.logged import LoggedRun
from kenotron.runs.summary import is_number

WIDTH, HEIGHT, MARKS, VALIDATION = 72, 18, "*o+x#@%&", "v"


def loss_plot(runs: Sequence[LoggedRun]) -> str:
    """Draw a curve for each run, with the mean of its steps in each column, and the last losses below.

    Raises InputError if no run has a loss, or there are more runs than marks.
    """
    if len(runs) > len(MARKS):
        raise InputError(f"RUN: expected at most {len(MARKS)} runs, found {len(runs)}; `kenotron report` draws more")
    curves, legend = list[tuple[str, NDArray[np.float64]]](), []
    for mark, run in zip(MARKS, runs):
        training, validation = _losses(run, "lm_loss"), _losses(run, "val_loss")
        curves += [(mark, training), (VALIDATION, validation)]
        legend.append(f"{mark} {run.name}: {training[-1, 1]:.4g}" if len(training) else f"{mark} {run.name}: no losses")
    tokens = np.concatenate([curve[:, 0] for _, curve in curves])
    if not len(tokens):
        raise InputError(f"{runs[0].folder}: its metrics.jsonl has no losses yet")
    x_range = f"{human_format(tokens.min())} to {human_format(tokens.max())} tokens"
    return "\n".join([*draw(curves), f"{'':10}{x_range}; {VALIDATION}: validation; last losses:", *legend])


def draw(curves: Sequence[tuple[str, NDArray[np.float64]]]) -> list[str]:
    """Return lines with the curves (mark, ``[points, 2]``); each column has the mean of its points."""
    x, y = np.concatenate([curve for _, curve in curves]).T
    (left, right), (low, high) = (x.min(), x.max()), (y.min(), y.max())
    canvas = np.full((HEIGHT, WIDTH), " ")
    for mark, curve in curves:
        column = np.rint((curve[:, 0] - left) / (right - left or 1) * (WIDTH - 1)).astype(int)
        for at in np.unique(column):
            mean = curve[column == at, 1].mean()
            canvas[round((high - mean) / (high - low or 1) * (HEIGHT - 1)), at] = mark
    labels = [f"{high:.4g}", *[""] * (HEIGHT - 2), f"{low:.4g}"]
    return [f"{label:>8} |{''.join(row)}".rstrip() for label, row in zip(labels, canvas)]


def _losses(run: LoggedRun, key: str) -> NDArray[np.float64]:
    """Return tokens and losses ``[steps, 2]`` of the steps that have a loss."""
    pairs = [(line["consumed_tokens"], line.get(key)) for line in run.steps.values()]
    return np.array([pair for pair in pairs if all(map(is_number, pair))], float).reshape(-1, 2)
