"""`kenotron mup check my.yaml`: check that `model.parametrization` holds at other widths and depths.

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
    doublings: Annotated[int, typer.Option(help="Of base_width, and with completep also of base_depth.", min=1)] = 2,
    steps: Annotated[int, typer.Option(help="Steps before outputs are measured.", min=1)] = 3,
    learning_rates: Annotated[bool, typer.Option("--learning-rates", help="Find the best rate of two widths.")] = False,
) -> None:
    """Train a few steps at several sizes, and check that every module's output is as large and moves as far.

    The standard parametrization is shown beside that of the config. Exit code 0: it holds; 1: it does not.
    """
    from kenotron.config import load, refuse_unsupported
    from kenotron.launch.transfer import coordinates, rates, table

    config = load(file, overrides or [], report=to_stderr)
    refuse_unsupported(config)
    sizes = [2**exponent for exponent in range(doublings + 1)]
    sweeps = coordinates(config, sizes, steps, say=to_stderr)
    holds = all(sweep.promised.all() for sweep in sweeps[::2])
    for sweep, standard in zip(sweeps[::2], sweeps[1::2]):
        typer.echo("\n".join(table(sweep, standard)))
    if learning_rates:
        holds = _compare_rates(rates(config, sizes[-1], to_stderr)) and holds
    raise typer.Exit(0 if holds else 1)


def _compare_rates(grids: "Sequence[Grid]") -> bool:
    """Plot the losses over rates, print the best rates, and return whether the parametrization's carries over."""
    import numpy as np

    from kenotron.runs.plot import MARKS, draw

    curves = [np.array([(np.log2(rate), loss) for rate, loss in grid.losses.items()]) for grid in grids]
    typer.echo("\n".join(draw([*zip(MARKS, curves)])))
    typer.echo(f"{'':10}losses over learning rates, each √2 times the one before")
    small, *large = grids
    carries = [2**-0.5 <= grid.best / small.best <= 2**0.5 for grid in large]  # a step of the grid
    typer.echo(f"{MARKS[0]} {small.kind}, base_width: best rate {small.best:.4g}")
    for mark, grid, same in zip(MARKS[1:], large, carries):
        verdict = "holds" if same else "does not hold"
        typer.echo(f"{mark} {grid.kind}, {grid.size} times as wide: best rate {grid.best:.4g}: {verdict}")
    return carries[0]
