"""`kenotron chat checkpoints/100`: talk to a model whose tokenizer has a chat template.

Every line of stdin is a turn; the answer is streamed to stdout. Ctrl-D ends the conversation. A pipe works, too:

    (echo Hello; echo And in French?) | kenotron chat org/name-instruct
"""

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from kenotron.cli import sampling_options as options
from kenotron.cli.remote import fetch_model
from kenotron.generation.options import SamplingOptions


def chat(
    path: options.ModelPath,
    system: Annotated[str | None, typer.Option(help="Instructions before the first turn.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of tokens in an answer.")] = 512,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End an answer before this string; can be repeated.")] = None,
    dtype: options.Dtype = None,
) -> None:
    """Talk to a trained model, turn by turn."""
    sampling = SamplingOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop or (),
    )
    local = fetch_model(path)
    from kenotron.generation.chat import Chat
    from kenotron.generation.load import load_for_generation
    from kenotron.generation.printing import STOPS

    model, tokenizer, _ = load_for_generation(local, dtype)
    conversation = Chat(model, tokenizer, system)
    for text in _turns():
        answer = conversation.reply(text, sampling, stream=lambda piece: print(piece, end="", flush=True))
        print(flush=True)
        if answer.stopped_by in STOPS:
            print(STOPS[answer.stopped_by], file=sys.stderr)


def _turns() -> Iterator[str]:
    """Yield the lines of stdin that are not blank, with a prompt on a terminal."""
    on_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> ") if on_terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        if not line and not on_terminal:
            return
        if line.strip():
            yield line.strip()
