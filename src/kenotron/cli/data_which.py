"""`kenotron data which CONFIG --step N`: the files, windows and documents that a step of a run reads.

kenotron data which my.yaml --step 100
kenotron data which my.yaml --step 100 --json tokens.sequence_length=2048
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kenotron.cli.data import app

if TYPE_CHECKING:
    from kenotron.data.provenance import SampleOrigin


@app.command()
def which(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Keys to change: dotted.path=value.")] = None,
    step: Annotated[int, typer.Option(help="The step, from 1.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """What a step reads: file, window and documents of every sample, from the order alone."""
    from kenotron.config import load, refuse_unsupported
    from kenotron.data import open_run
    from kenotron.data.provenance import step_origins

    run = load(config, overrides or ())
    refuse_unsupported(run)
    with open_run(run, step, _quiet) as data:
        stage, origins = data.stage_at(step).name, step_origins(data, step)
    if as_json:
        print(json.dumps({"step": step, "stage": stage, "samples": [asdict(origin) for origin in origins]}, indent=2))
        return
    print(f"step {step} of stage '{stage}': {len(origins)} samples")
    for origin in origins:
        print(_line(origin))


def _line(origin: SampleOrigin) -> str:
    head = f"sample {origin.sample}: "
    if origin.file is None or origin.first_token is None or origin.end_token is None:
        return f"{head}{origin.source}[{origin.index}]"
    line = f"{head}{origin.file} window {origin.window}, tokens {origin.first_token}-{origin.end_token - 1}"
    if origin.documents is None:
        return f"{line}, documents not known"
    ranges = (f"{each.document} ({each.first_token}-{each.end_token - 1})" for each in origin.documents)
    return f"{line}, {'document' if len(origin.documents) == 1 else 'documents'} {', '.join(ranges)}"


def _quiet(line: str) -> None:
    """What opening the data has to say is not asked for here."""
