"""`kenotron generate checkpoints/100 --prompt "def main("`: text from a checkpoint.

Without a prompt two built-in ones are continued. Prompts stand in the order of the command line, then those
of the file. Text goes to stdout, everything else to stderr; with --json, one object a prompt and line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kenotron.config.errors import InputError, NotSupportedYet

if TYPE_CHECKING:
    from kenotron.generate import Completion

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
) -> None:
    """Continue prompts with a trained model."""
    if stream and as_json:
        raise InputError("--stream and --json: give one of them")
    prompts = _prompts(prompt or [], prompt_file, prompt_tokens or [])
    from kenotron.generate import generate as decode
    from kenotron.generate import load_for_generation

    model, tokenizer, _ = load_for_generation(path, dtype)
    if tokenizer is None and not prompt_tokens:
        raise InputError(f"{path} has no tokenizer: give --prompt-tokens 1,2,3 instead of text")

    def run(some: Sequence[str | list[int]], listener: Callable[[int, str], None] | None) -> list[Completion]:
        return decode(
            model,
            tokenizer,
            some,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_at_eos=eos_stop,
            batch_size=1 if listener else batch_size,
            stream=listener,
        )

    if stream:
        if tokenizer is None:
            raise InputError(f"--stream: {path} has no tokenizer, so there is no text to print as it comes")
        printer = _Printer([text if isinstance(text, str) else tokenizer.decode(text) for text in prompts])
        completions = run(prompts, printer)
        printer.begin(len(prompts))
        print()
        for number, completion in enumerate(completions):
            _warn(number, completion)
    elif as_json:
        for completion in run(prompts, None):
            print(json.dumps(_as_dict(completion), ensure_ascii=False), flush=True)
    else:
        _print(run(prompts, None))


def _prompts(texts: list[str], file: str | None, tokens: list[str]) -> list[str | list[int]]:
    """All prompts in order; the built-in ones where nothing was given."""
    given = bool(texts or file or tokens)
    lines = _lines(file) if file else []
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
    """``run_generate.py --ckpt-path checkpoints/10/ --tp 1 --pp 1``: the same command in nanotron's spelling.

    Works under torchrun with one process. The key-value cache is always on; ``--use-cache`` asks for what is
    there.
    """
    import argparse

    from kenotron.cli import main

    parser = argparse.ArgumentParser(prog="run_generate.py", description="Generate from a checkpoint.")
    parser.add_argument("--ckpt-path", required=True, help="checkpoint, or folder of checkpoints")
    for axis in ("dp", "pp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help="1 (0: as the checkpoint needs, which is 1)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--use-cache", action="store_true", help="always on")
    given, rest = parser.parse_known_args(arguments)
    problem = _layout_problem({axis: getattr(given, axis) for axis in ("dp", "pp", "tp")})
    if problem:
        if os.environ.get("RANK", "0") == "0":  # one line, not one a rank
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    main(["generate", given.ckpt_path, "--max-new-tokens", str(given.max_new_tokens), *rest])


def _layout_problem(degrees: dict[str, int]) -> InputError | None:
    """Generation runs in one process; a checkpoint of any layout can be read by it."""
    for axis, degree in degrees.items():
        if degree not in (0, 1):
            return NotSupportedYet(f"generation with --{axis} {degree}; any checkpoint can be read with --{axis} 1")
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        return NotSupportedYet(
            f"generation on {world} processes; start it with --nproc_per_node=1, or without torchrun"
        )
    return None
