"""`kenotron mup check my.yaml`: whether `model.parametrization` holds at other widths and depths.

Exit code 0: it holds; 1: it does not.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kenotron.cli.config import File, Overrides
from kenotron.cli.tables import to_stderr

if TYPE_CHECKING:
    from kenotron.launch.transfer import Grid

app = typer.Typer(help="Check that a learning rate carries over to other sizes.", no_args_is_help=True)


@app.command()
def check(
    file: File,
    overrides: Overrides = None,
    doublings: Annotated[int, typer.Option(help="Of base_width, and of base_depth with completep.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Steps before outputs are measured.", min=1)] = 3,
    learning_rates: Annotated[bool, typer.Option("--learning-rates", help="Find the best rate of two widths.")] = False,
) -> None:
    """Train a few steps at several sizes, and check that every module's output is as large and moves as far.

    Beside the parametrization of the config stands the standard one. Exit code 0: it holds; 1: it does not.
    """
    from kenotron.config import load, refuse_unsupported
    from kenotron.launch.transfer import coordinates, rates, table

    config = load(file, overrides or [], report=to_stderr)
    refuse_unsupported(config)
    sizes = [2**doubled for doubled in range(doublings + 1)]
    sweeps = coordinates(config, sizes, steps, say=to_stderr)
    holds = all(sweep.promised.all() for sweep in sweeps[::2])
    for ours, standard in zip(sweeps[::2], sweeps[1::2]):
        typer.echo("\n".join(table(ours, standard)))
    if learning_rates:
        holds = _compare_rates(rates(config, sizes[-1], to_stderr)) and holds
    raise typer.Exit(0 if holds else 1)


def _compare_rates(grids: "Sequence[Grid]") -> bool:
    """Draw the losses over rates and print the best ones; whether that of the parametrization carries over."""
    import numpy as np

    from kenotron.runs.plot import MARKS, drawn

    points = [[(np.log2(rate), loss) for rate, loss in grid.losses.items()] for grid in grids]
    typer.echo("\n".join(drawn([(mark, np.array(each)) for mark, each in zip(MARKS, points)])))
    typer.echo(f"{'':10}losses over learning rates, each √2 times the one before")
    small, *large = grids
    carries = [2**-0.5 <= grid.best / small.best <= 2**0.5 for grid in large]  # a step of the grid
    typer.echo(f"{MARKS[0]} {small.kind}, base_width: best rate {small.best:.4g}")
    for mark, grid, same in zip(MARKS[1:], large, carries):
        found = f"best rate {grid.best:.4g}: {'holds' if same else 'does not hold'}"
        typer.echo(f"{mark} {grid.kind}, {grid.size} times as wide: {found}")
    return carries[0]
