"""`kenotron generate checkpoints/100 --prompt "def main("`: text from a checkpoint.

Without a prompt two built-in ones are continued. Prompts stand in the order of the command line, then those
of the file. Text goes to stdout, everything else to stderr; with --json, one object a prompt and line.

    kenotron generate checkpoints/100 --tp 2 --pp 2        starts four local ranks; rank 0 prints

whatever layout the checkpoint was saved on. Under torchrun each process is one of the ranks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kenotron.config.errors import InputError

if TYPE_CHECKING:
    import torch

    from kenotron.config import Config
    from kenotron.generate import Completion
    from kenotron.parallel.mesh import Mesh

WORK = "kenotron.cli.generate.on_ranks"
BUILT_IN_PROMPTS = ("The future of AI is", "def fib(n)")


def generate(
    path: Annotated[
        Path, typer.Argument(help="A checkpoint, a folder of checkpoints (its newest), or a Hugging Face folder.")
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help="A file with one prompt a line; - is stdin.")] = None,
    prompt_tokens: Annotated[
        list[str] | None, typer.Option(help="Token ids to continue, such as 1,17,4; needs no tokenizer.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add to each prompt, at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most likely token always (greedy).")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens that reach this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    eos_stop: Annotated[bool, typer.Option("--eos-stop/--no-eos-stop", help="Stop at the end-of-text token.")] = True,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print text as it comes, one prompt after the other.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt and line.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the config's.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts that are decoded together.")] = 8,
    tp: Annotated[int, typer.Option(help="Tensor-parallel shards of the model.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages of the model.", min=1)] = 1,
    dp: Annotated[int, typer.Option(help="Copies of the model that share out the prompts.", min=1)] = 1,
) -> None:
    """Continue prompts with a trained model."""
    if stream and as_json:
        raise InputError("--stream and --json: give one of them")
    with _said_once():
        _check_processes(dp, pp, tp)
        prompts = _prompts(prompt or [], prompt_file, prompt_tokens or [])
        from kenotron.generate import layout_config
        from kenotron.interop.sources import open_source

        config = layout_config(open_source(path, verify=False).model, dp=dp, pp=pp, tp=tp)
    from kenotron.launch import leave, work_on_ranks

    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "stop_at_eos": eos_stop,
        "batch_size": 1 if stream else batch_size,
    }
    show = "stream" if stream else "json" if as_json else "text"
    work_on_ranks(config, WORK, path=str(path), prompts=prompts, dtype=dtype, show=show, settings=settings)
    leave()


def on_ranks(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    *,
    path: str,
    prompts: list[str | list[int]],
    dtype: str | None,
    show: Literal["text", "json", "stream"],
    settings: dict[str, Any],
) -> None:
    """Continue `prompts` (rank 0's are those of all) on every rank of the mesh; rank 0 prints."""
    from kenotron.checkpoint.ranks import on_first
    from kenotron.generate import generate as decode
    from kenotron.generate import load_for_generation

    prompts = on_first(lambda: prompts)
    model, tokenizer, _ = load_for_generation(path, dtype, device, mesh)
    if tokenizer is None and any(isinstance(prompt, str) for prompt in prompts):
        raise InputError(f"{path} has no tokenizer: give --prompt-tokens 1,2,3 instead of text")
    if tokenizer is None and show == "stream":
        raise InputError(f"--stream: {path} has no tokenizer, so there is no text to print as it comes")
    printer = None
    if tokenizer is not None and show == "stream" and mesh.is_first:
        printer = _Printer([text if isinstance(text, str) else tokenizer.decode(text) for text in prompts])
    completions = decode(model, tokenizer, prompts, stream=printer, **settings)
    if not mesh.is_first:
        return
    if printer is not None:
        printer.begin(len(prompts))
        print()
        for number, completion in enumerate(completions):
            _warn(number, completion)
    elif show == "json":
        for completion in completions:
            print(json.dumps(_as_dict(completion), ensure_ascii=False), flush=True)
    else:
        _print(completions)


@contextmanager
def _said_once() -> Iterator[None]:
    """What is wrong with the command line is wrong on every rank that torchrun has started: rank 0 says it."""
    try:
        yield
    except InputError:
        if os.environ.get("RANK", "0") == "0":
            raise
        raise typer.Exit(2) from None


def _check_processes(dp: int, pp: int, tp: int) -> None:
    """Under torchrun the degrees must be those of the processes that there are."""
    from kenotron.launch.environment import ranks_from_environment, started_as_rank

    needed = dp * pp * tp
    if started_as_rank() and ranks_from_environment().world_size != needed:
        raise InputError(
            f"--dp {dp} x --pp {pp} x --tp {tp} = {needed} ranks, but "
            f"{ranks_from_environment().world_size} processes were started"
        )


def _prompts(texts: list[str], file: str | None, tokens: list[str]) -> list[str | list[int]]:
    """All prompts in order; the built-in ones where nothing was given."""
    given = bool(texts or file or tokens)
    first = os.environ.get("RANK", "0") == "0"  # the others get its prompts: there is one stdin
    lines = _lines(file) if file and first else []
    return [*texts, *lines, *(_ids(text) for text in tokens)] if given else list(BUILT_IN_PROMPTS)


def _lines(file: str) -> list[str]:
    """One prompt a line; blank lines are no prompts."""
    name = "stdin" if file == "-" else file
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).expanduser().read_bytes()
        lines = [line for line in data.decode("utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise InputError(f"--prompt-file: cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt-file: {name} is not UTF-8: {error.reason} at byte {error.start}") from None
    if not lines:
        raise InputError(f"--prompt-file: {name} has no prompt; expected one a line")
    return lines


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(f"--prompt-tokens: expected ids such as 1,17,4, found {text!r}") from None


def _as_dict(completion: Completion) -> dict[str, Any]:
    return {
        "prompt": completion.prompt,
        "text": completion.text,
        "tokens": completion.tokens,
        "stopped_by": completion.stopped_by,
    }


def _print(completions: list[Completion]) -> None:
    """Prompt and text as one piece, a blank line between two; ids where there is no tokenizer."""
    for number, completion in enumerate(completions):
        text = completion.prompt + completion.text
        print("\n" * (number > 0) + (text or " ".join(map(str, completion.tokens))))
        _warn(number, completion)


def _warn(number: int, completion: Completion) -> None:
    """What stopped a text, where it was not what one would expect."""
    reasons = {
        "max_position_embeddings": "stopped at the model's max_position_embeddings",
        "non_finite_logits": "stopped: the model's logits are not finite (damaged weights, or dtype too small)",
    }
    if completion.stopped_by in reasons:
        print(f"prompt {number + 1}: {reasons[completion.stopped_by]}", file=sys.stderr)


class _Printer:
    """Prints texts as they come; prompts too, each before its first piece, also where no piece follows."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts, self.begun = prompts, 0

    def __call__(self, number: int, piece: str) -> None:
        self.begin(number + 1)
        print(piece, end="", flush=True)

    def begin(self, count: int) -> None:
        """Print the prompts up to this many."""
        for number in range(self.begun, count):
            print("\n\n" * (number > 0) + self.prompts[number], end="", flush=True)
        self.begun = max(self.begun, count)


def seeds_main(arguments: Sequence[str] | None = None) -> None:
    """``run_generate.py --ckpt-path checkpoints/10/ --tp 2 --pp 2``: the same command in nanotron's spelling.

    Works under torchrun, where dp x pp x tp must be its processes, and without. The key-value cache is always on;
    ``--use-cache`` asks for what is there.
    """
    import argparse

    from kenotron.cli import main

    parser = argparse.ArgumentParser(prog="run_generate.py", description="Generate from a checkpoint.")
    parser.add_argument("--ckpt-path", required=True, help="checkpoint, or folder of checkpoints")
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help="ranks (0: as the checkpoint needs, which is 1)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--use-cache", action="store_true", help="always on")
    given, rest = parser.parse_known_args(arguments)
    layout = [part for axis in ("dp", "pp", "tp") for part in (f"--{axis}", str(getattr(given, axis) or 1))]
    main(["generate", given.ckpt_path, "--max-new-tokens", str(given.max_new_tokens), *layout, *rest])
