"""What `kenotron generate` prints on rank 0: text on stdout, warnings on stderr."""

import json
import sys
from collections.abc import Sequence

from kenotron.generation.decode import Completion

STOPS = {
    "max_position_embeddings": "stopped at the model's max_position_embeddings",
    "non_finite_logits": "stopped: the model's logits are not finite (damaged weights, or dtype too small)",
}


def print_json(completions: Sequence[Completion]) -> None:
    """One object a prompt and line."""
    for completion in completions:
        found: dict[str, object] = {
            "prompt": completion.prompt,
            "text": completion.text,
            "tokens": completion.tokens,
            "stopped_by": completion.stopped_by,
        }
        if completion.logprobs is not None:
            found["logprobs"] = completion.logprobs
        print(json.dumps(found, ensure_ascii=False), flush=True)


def print_texts(completions: Sequence[Completion]) -> None:
    """Prompt and text as one, a blank line between two; ids where there is no tokenizer."""
    for number, completion in enumerate(completions):
        text = completion.prompt + completion.text
        print("\n" * (number > 0) + (text or " ".join(map(str, completion.tokens))))
        _warn(number, completion)


def warn_of_stops(completions: Sequence[Completion]) -> None:
    """A line on stderr for every text that ended for another reason than its end or max_new_tokens."""
    for number, completion in enumerate(completions):
        _warn(number, completion)


def _warn(number: int, completion: Completion) -> None:
    if completion.stopped_by in STOPS:
        print(f"prompt {number + 1}: {STOPS[completion.stopped_by]}", file=sys.stderr)


class StreamPrinter:
    """Prints texts as they come; prompts too, each before its text, also where no text follows."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts, self.printed = prompts, 0

    def __call__(self, number: int, text: str) -> None:
        """Print more `text` of prompt `number`."""
        self._print_prompts(number + 1)
        print(text, end="", flush=True)

    def finish(self) -> None:
        """Print the prompts that no text came for, and end the line."""
        self._print_prompts(len(self.prompts))
        print()

    def _print_prompts(self, count: int) -> None:
        for number in range(self.printed, count):
            print("\n\n" * (number > 0) + self.prompts[number], end="", flush=True)
        self.printed = max(self.printed, count)
