"""`kenotron data which CONFIG`: print the files, windows and documents that a step of a run reads.

kenotron data which my.yaml --step 100
kenotron data which my.yaml --step 100 --json tokens.sequence_length=2048
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from kenotron.cli.data import app


@app.command()
def which(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    step: Annotated[int, typer.Option(help="Print what this step reads; steps count from 1.", min=1)],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides: dotted.path=value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the files, windows and documents that a step reads, computed from the data order alone."""
    from kenotron.checkpoint.folders import list_checkpoints, quiet
    from kenotron.config import load, refuse_unsupported
    from kenotron.data import open_run
    from kenotron.launch.data_which import describe_step, start_of

    run = load(config, overrides or ())
    refuse_unsupported(run)
    saved = [entry for entry in list_checkpoints(run.checkpoint_folder) if entry.problem is None]
    start = start_of(run, saved[-1] if saved else None)
    run = start.in_run_steps(run)
    with open_run(run, step, quiet, held_out=start.held_out) as data:
        record, lines = describe_step(data, step)
    print(json.dumps(record, indent=2) if as_json else "\n".join(lines))
