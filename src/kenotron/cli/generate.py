"""`kenotron generate checkpoints/100 --prompt "def main("`: continue text with a checkpoint.

Without a prompt, two built-in ones are continued, and named on stderr. Prompts of the command line come first, then
those of the file. Text goes to stdout, everything else to stderr; with --json, one line with one object per prompt.

    kenotron generate checkpoints/100 --tp 2 --pp 2        starts four local ranks; rank 0 prints

The checkpoint may have been saved on any layout. Under torchrun each process is one of the ranks, and the default
degrees are the checkpoint's, if they fit the number of processes.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kenotron.cli import sampling_options as options
from kenotron.cli.rank0 import on_rank_0, report_once
from kenotron.cli.remote import fetch_model
from kenotron.config.errors import InputError, os_errors
from kenotron.generation.options import SamplingOptions

BUILT_IN_PROMPTS = ("The future of AI is", "def fib(n)")


def generate(
    path: options.ModelPath,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; can be repeated.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="A file with one prompt per line; - is stdin.")] = None,
    prompt_tokens: Annotated[
        list[str] | None, typer.Option(help="Token ids to continue, such as 1,17,4; no tokenizer needed.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens per prompt.")] = 64,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End a text before this string; can be repeated.")] = None,
    eos_stop: Annotated[bool, typer.Option("--eos-stop/--no-eos-stop", help="Stop at the end-of-text token.")] = True,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as it is generated, one prompt after the other.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, each on its own line.")
    ] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: the logarithm of every token's probability.")
    ] = False,
    dtype: options.Dtype = None,
    ema: options.Ema = False,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded per batch.", min=1)] = 8,
    tp: Annotated[
        int | None,
        typer.Option(
            help="Degree of tensor parallelism; default of all three: 1, or under torchrun the checkpoint's.", min=1
        ),
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Number of pipeline stages.", min=1)] = None,
    dp: Annotated[
        int | None, typer.Option(help="Replicas of the model; prompts are divided among them.", min=1)
    ] = None,
    ep: Annotated[
        int,
        typer.Option(
            help="How many of the replicas share the experts of a layer; they decode the same prompts.", min=1
        ),
    ] = 1,
) -> None:
    """Continue prompts with a trained model."""
    if stream and as_json:
        raise InputError("--stream and --json: give only one of them")
    if logprobs and not as_json:
        raise InputError("--logprobs: needs --json, as plain text has no place for them")
    with report_once():
        prompts = _prompts(prompt or [], prompt_file, prompt_tokens or [])
        sampling = SamplingOptions(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or (),
            stop_at_eos=eos_stop,
            logprobs=logprobs,
        )
        local = fetch_model(path)
        from kenotron.generation.layout import check_layout, choose_layout
        from kenotron.generation.request import Request, decode_on_ranks
        from kenotron.interop.sources import open_source
        from kenotron.launch.environment import ranks_from_environment, started_as_rank

        source = open_source(local, verify=False)
        started = ranks_from_environment().world_size if started_as_rank() else None
        layout = choose_layout(dp, pp, tp, source.layout, started, ep)
        check_layout(source.model.decoder, layout)
    from kenotron.launch import work_on_ranks

    request = Request(
        parallelism=layout,
        path=str(local),
        prompts=prompts,
        built_in=not (prompt or prompt_file or prompt_tokens),
        dtype=dtype,
        ema=ema,
        show="stream" if stream else "json" if as_json else "text",
        sampling=sampling,
        batch_size=1 if stream else batch_size,
    )
    work_on_ranks(request, decode_on_ranks)


def _prompts(texts: list[str], file: str | None, tokens: list[str]) -> list[str | list[int]]:
    """Return all prompts in order; the built-in ones if the command has none."""
    if not (texts or file or tokens):
        return list(BUILT_IN_PROMPTS)
    lines = _lines(file) if file and on_rank_0() else []  # only rank 0 has stdin; the others get its prompts
    return [*texts, *lines, *(_ids(text) for text in tokens)]


def _lines(file: str) -> list[str]:
    """Return the prompts of a file, one per line; blank lines are skipped."""
    name = "stdin" if file == "-" else file
    with os_errors(f"--prompt-file: cannot read {name}"):
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
    try:
        lines = [line for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt-file: {name} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not lines:
        raise InputError(f"--prompt-file: {name} has no prompt; expected one per line")
    return lines


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--prompt-tokens: expected ids such as 1,17,4, found {text!r}") from None
