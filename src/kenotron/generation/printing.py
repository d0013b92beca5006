"""Print the results of `kenotron generate` on rank 0: text on stdout, warnings on stderr."""

import json
import sys
from collections.abc import Sequence

from kenotron.generation.decode import Completion

STOPS = {
    "max_position_embeddings": "stopped at the model's max_position_embeddings",
    "non_finite_logits": "stopped: the model's logits are not finite (damaged weights, or dtype too small)",
}


def print_json(completions: Sequence[Completion]) -> None:
    """Print one JSON object per prompt, each on a line."""
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
    """Print each prompt with its text, separated by blank lines; without a tokenizer, print ids."""
    for number, completion in enumerate(completions):
        text = completion.prompt + completion.text
        print("\n" * (number > 0) + (text or " ".join(map(str, completion.tokens))))
        _warn(number, completion)


def warn_of_stops(completions: Sequence[Completion]) -> None:
    """Print a line on stderr for every text that ended for another reason than its end or max_new_tokens."""
    for number, completion in enumerate(completions):
        _warn(number, completion)


def _warn(number: int, completion: Completion) -> None:
    if completion.stopped_by in STOPS:
        print(f"prompt {number + 1}: {STOPS[completion.stopped_by]}", file=sys.stderr)


class StreamPrinter:
    """Prints texts as they are generated, each after its prompt; prompts without text are printed as well."""

    def __init__(self, prompts: Sequence[str]) -> None:
        self.prompts, self.printed = prompts, 0

    def __call__(self, number: int, text: str) -> None:
        """Print more `text` of prompt `number`."""
        self._print_prompts(number + 1)
        print(text, end="", flush=True)

    def finish(self) -> None:
        """Print the prompts without text, and end the line."""
        self._print_prompts(len(self.prompts))
        print()

    def _print_prompts(self, count: int) -> None:
        for number in range(self.printed, count):
            print("\n\n" * (number > 0) + self.prompts[number], end="", flush=True)
        self.printed = max(self.printed, count)
