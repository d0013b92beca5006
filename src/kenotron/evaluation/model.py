"""Adapt Kénotron's models to the interface of lm-evaluation-harness. Importing this module imports lm_eval."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kenotron.evaluation.scoring import Pair, Scored, log_likelihoods, longest_input
from kenotron.generation.decode import generate
from kenotron.generation.options import SamplingOptions
from kenotron.text.tokenizer import end_of_text, library_ids

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from kenotron.models.decoder import Decoder
    from kenotron.text.tokenizer import TextTokenizer


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Answers the three kinds of requests: continuations, whole texts, and texts to generate.

    Its tokens are those of lm_eval's `hf` backend.
    """

    def __init__(self, model: Decoder, tokenizer: TextTokenizer, batch_size: int) -> None:
        super().__init__()
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.longest = longest_input(model.config)

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return end_of_text(self.tokenizer, self.model.config)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Part of the names under which lm_eval caches requests."""
        return self.tokenizer.hash

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids, with the tokenizer's special tokens unless the text begins with the prefix token."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        return library_ids(self.tokenizer.backend, [string], special=add_special_tokens)[0]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs: list[Pair] = [(context, continuation) for _, context, continuation in requests]
        return [(scored.log_likelihood, scored.is_greedy) for scored in self._scores(pairs)]

    def _scores(self, pairs: Sequence[Pair]) -> list[Scored]:
        return log_likelihoods(self.model, pairs, self.batch_size, partial(print, file=sys.stderr, flush=True))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of whole texts; long texts are split into windows of the model's length."""
        windows: list[Pair] = []
        texts: list[int] = []  # the index of each window's text
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.longest, context_len=1):
                windows.append(make_disjoint_window(window))
                texts.append(number)
        totals = [0.0] * len(requests)
        for number, scored in zip(texts, self._scores(windows)):
            totals[number] += scored.log_likelihood
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the generated text after each context, up to one of the request's stop strings."""
        by_options: dict[SamplingOptions, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(_sampling(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for sampling, numbers in by_options.items():
            room = self.longest - sampling.max_new_tokens
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            completions = generate(self.model, self.tokenizer, prompts, sampling, batch_size=self.batch_size)
            for number, completion in zip(numbers, completions):
                texts[number] = completion.text
        return texts


def _sampling(options: dict[str, Any]) -> SamplingOptions:
    """Return the sampling options of a request to generate; greedy by default."""
    options = normalize_gen_kwargs(dict(options))
    until = options.get("until") or []
    return SamplingOptions(
        max_new_tokens=options["max_gen_toks"],
        temperature=float(options.get("temperature") or 0.0),
        stop=tuple(text for text in ([until] if isinstance(until, str) else until) if text),
    )
