"""Options that `kenotron generate`, `chat` and `evaluate` share."""

from typing import Annotated

import typer

ModelPath = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, a folder of checkpoints (the newest is used), local or s3://…, or a Hugging Face "
        "model: a folder or a hub name (local cache first)."
    ),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")]
TopK = Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Sample from the smallest set of tokens with this total probability.")]
MinP = Annotated[
    float, typer.Option(help="Sample from the tokens with at least this share of the likeliest one's probability.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Penalty on tokens of the text so far; 1: none, above 1: less likely.")
]
Seed = Annotated[int, typer.Option(help="Seed of the sampling.")]
Ema = Annotated[
    bool, typer.Option("--ema", help="Use the moving average of the weights that the run kept (optimizer.ema_decay).")
]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the config's.")]
