"""`kenotron init`: a commented config to start from.

kenotron init                          list the starters
kenotron init text-folder > my.yaml    write one
"""

from importlib.resources import files
from typing import Annotated

import typer

from kenotron.config.errors import InputError, nearest


def starters() -> dict[str, str]:
    """Name and YAML text of every starter; its first line, a comment, says what it is for."""
    folder = files("kenotron.config").joinpath("starters")
    found = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in sorted(found, key=lambda file: file.name)
    }


def init(
    name: Annotated[str | None, typer.Argument(help="Name of a starter; omit it to list them.")] = None,
) -> None:
    """Print a commented starter config, or list the starters."""
    texts = starters()
    if name is None:
        width = max(map(len, texts))
        for each, text in texts.items():
            typer.echo(f"{each:{width}}  {text.splitlines()[0].lstrip('# ')}")
    elif name in texts:
        typer.echo(texts[name], nl=False)
    else:
        raise InputError(f"no starter '{name}'{nearest(name, texts)} (there are {', '.join(texts)})")
