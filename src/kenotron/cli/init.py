"""`kenotron init`: print a commented config to start from.

kenotron init                          list the starters
kenotron init text-folder > my.yaml    write one
"""

from importlib.resources import files
from typing import Annotated

import typer

from kenotron.config.errors import InputError, nearest


def starters() -> dict[str, str]:
    """Return name → YAML text of every starter; the comment in the first line is its description."""
    folder = files("kenotron.config").joinpath("starters")
    starters = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in starters}


def init(name: Annotated[str | None, typer.Argument(help="Name of a starter; omit it to list them.")] = None) -> None:
    """Print a commented starter config, or list the starters."""
    texts = starters()
    if name is None:
        width = max(map(len, texts))
        for starter, text in texts.items():
            typer.echo(f"{starter:{width}}  {text.splitlines()[0].lstrip('# ')}")
    elif name in texts:
        typer.echo(texts[name], nl=False)
    else:
        raise InputError(f"no starter '{name}'{nearest(name, texts)} (there are {', '.join(texts)})")
