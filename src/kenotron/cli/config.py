"""`kenotron config`: look at a config without running it.

kenotron config check my.yaml                            is it valid, and can it be run
kenotron config show my.yaml tokens.train_steps=100      every key, defaults and overrides filled in
kenotron config diff a.yaml b.yaml                       one line per key that differs
kenotron config schema > config.schema.json              JSON schema for an editor
kenotron config reference                                the reference page as Markdown
"""

from __future__ import annotations

from typing import Annotated

import typer

from kenotron.config import Config, dump, load, refuse_unsupported
from kenotron.config import diff as differences
from kenotron.config.data import paths_of
from kenotron.config.errors import counted

app = typer.Typer(help="Check, show and compare configs.", no_args_is_help=True)

File = Annotated[str, typer.Argument(metavar="FILE", help="A YAML config.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides: dotted.path=value.")]


def _say(line: str) -> None:
    typer.echo(line, err=True)


@app.command()
def check(file: File, overrides: Overrides = None) -> None:
    """Check a config: keys, types, cross-checks, and that everything in it is supported."""
    config = load(file, overrides or [], report=_say)
    refuse_unsupported(config)
    _check_restarts(config)
    stages, lengths = config.data_stages, set(config.sequence_lengths.values())
    samples, length = f"{config.global_batch_size}", f"{max(lengths)}"
    if any(stage.batch_size_ramp for stage in stages):
        samples = f"up to {samples}"
    if len(lengths) > 1 or any(stage.sequence_length_ramp for stage in stages):
        length = f"up to {length}"
    typer.echo(
        f"{file}: valid: {config.tokens.train_steps} steps of {samples} sequences of {length} tokens, "
        f"{counted(len(stages), 'stage')}"
    )


def _check_restarts(config: Config) -> None:
    """Errors (InputError): a stage restarts what no earlier one read. (A mix file may lie where the run will be.)"""
    paths = [path for dataset in config.datasets for path in paths_of(dataset)]
    if any(stage.data.restart for stage in config.data_stages) and not any(path.endswith(".json") for path in paths):
        from kenotron.data.stage_plan import plan_stages  # half a second: only where it can find an error

        plan_stages(config)


@app.command()
def show(
    file: File,
    overrides: Overrides = None,
    comments: Annotated[bool, typer.Option("--comments", help="Write each key's description above it.")] = False,
) -> None:
    """Print a config with every default and override filled in; the output is a config again."""
    config = load(file, overrides or [], report=_say)
    if comments:
        from kenotron.config.commented import dump_commented

        typer.echo(dump_commented(config), nl=False)
    else:
        typer.echo(dump(config), nl=False)


@app.command()
def diff(a: File, b: File) -> None:
    """Print every key whose value differs between two configs, including defaults."""
    for path, old, new in differences(load(a, report=_say), load(b, report=_say)):
        typer.echo(f"{path}: {old!r} -> {new!r}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a config, for editors."""
    from kenotron.config.reference import json_schema_text

    typer.echo(json_schema_text(), nl=False)


@app.command()
def reference() -> None:
    """Print the config reference, a Markdown page."""
    from kenotron.config.reference import page

    typer.echo(page(), nl=False)
