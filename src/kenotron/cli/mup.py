"""`kenotron mup check my.yaml`: whether `model.parametrization` holds at other widths and depths.

Exit code 0: it holds; 1: it does not.
"""

from typing import Annotated

import typer

from kenotron.cli.config import File, Overrides
from kenotron.cli.tables import to_stderr

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
    from kenotron.launch.transfer import best_rates, coordinates, table

    config = load(file, overrides or [], report=to_stderr)
    refuse_unsupported(config)
    sizes = [2**doubled for doubled in range(doublings + 1)]
    sweeps = coordinates(config, sizes, steps, say=to_stderr)
    holds = all(sweep.promised.all() for sweep in sweeps[::2])
    for ours, standard in zip(sweeps[::2], sweeps[1::2]):
        typer.echo("\n".join(table(ours, standard)))
    for kind, best in best_rates(config, sizes[-1], to_stderr).items() if learning_rates else ():
        carries = 2**-0.5 <= best[1] / best[0] <= 2**0.5  # a step of their grid
        typer.echo(f"{kind}: best rate {best[0]:.4g}, then {best[1]:.4g}: {'holds' if carries else 'does not hold'}")
        holds = holds and (carries or kind == "standard")
    raise typer.Exit(0 if holds else 1)
