"""`kenotron train my.yaml`: train a config, or resume its run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kenotron.cli.rank0 import on_rank_0, report_once


def train(
    file: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Any key by its dotted path, such as tokens.train_steps=100; more YAML files."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move earlier checkpoints aside and start at step 0.")] = False,
    spares: Annotated[
        int, typer.Option(min=0, help="Spare processes: one takes the place of a rank that dies or hangs.")
    ] = 0,
    config_follows: Annotated[
        bool, typer.Option("--config", "--config-file", hidden=True, help="Changes nothing: FILE follows.")
    ] = False,
    nanotron: Annotated[bool, typer.Option("--nanotron", hidden=True)] = False,
) -> None:
    """Train a config, with as many local processes as its layout needs. Resumes from the newest complete checkpoint."""
    from kenotron.config import load, refuse_unsupported
    from kenotron.launch import check_processes, launch
    from kenotron.launch.before_start import changed_batch

    with report_once():
        config = load(file, overrides or (), report=_say)
        refuse_unsupported(config)
        if nanotron and "format" not in config.logging.model_fields_set:
            config = config.model_copy(update={"logging": config.logging.model_copy(update={"format": "nanotron"})})
        check_processes(config)
    for line in changed_batch(file, config, overrides or ()):
        _say(f"warning: {line}")
    launch(config, fresh=fresh, spares=spares)


def _say(line: str) -> None:
    if on_rank_0():  # lines about the file are the same on every rank
        print(line, file=sys.stderr)
