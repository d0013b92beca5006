"""`kenotron evaluate checkpoints/100 --tasks hellaswag,my_choices`: run tasks of lm-evaluation-harness on a model.

It does what the section `evaluation` does during training, for one checkpoint. A table goes to stdout, or with --json
one object.
"""

import json
from typing import Annotated

import typer

from kenotron.cli import sampling_options as options
from kenotron.cli.remote import fetch_model


def evaluate(
    path: options.ModelPath,
    tasks: Annotated[str, typer.Option(help="Tasks, groups or tags of lm_eval, with commas between them.")],
    include_path: Annotated[str | None, typer.Option(help="Folder with YAML files of tasks of your own.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples before each question.", min=0)] = None,
    limit: Annotated[int | None, typer.Option(help="Number of documents of each task, the first ones.", min=1)] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)] = 8,
    dtype: options.Dtype = None,
    ema: options.Ema = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness."""
    local = fetch_model(path)
    import kenotron

    results = kenotron.evaluate(
        local,
        tasks.split(","),
        include_path=include_path,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=batch_size,
        dtype=dtype,
        ema=ema,
    )
    if as_json:
        data = {task: {name: value._asdict() for name, value in metrics.items()} for task, metrics in results.items()}
        print(json.dumps(data))
        return
    width = max(map(len, results))
    for task, metrics in results.items():
        for name, (value, stderr) in metrics.items():
            print(f"{task:{width}}  {name:16}  {value:.4f}" + (f" ± {stderr:.4f}" if stderr else ""))
