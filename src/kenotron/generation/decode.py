"""Continue prompts with one packed forward pass over all of them, and then one token per row and step.

    model, tokenizer, _ = load_for_generation("checkpoints/10")
    for completion in generate(model, tokenizer, ["def main(", "import "], SamplingOptions(max_new_tokens=16)):
        print(completion.prompt + completion.text)

A row's tokens depend only on the row: other rows change neither its attention nor its random numbers, so any batch size
gives the same texts (up to the rounding of matrix products, which depends on their shape). A finished row leaves the
batch.

The loop is the same for all layouts: with tp and pp, all ranks of a replica run it on the same rows (`ModelOnRanks`).
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Literal

import torch

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.errors import InputError
from kenotron.generation.kv_cache import KVCache
from kenotron.generation.model_on_ranks import ModelOnRanks
from kenotron.generation.options import SamplingOptions
from kenotron.generation.sampling import NOT_FINITE, log_probabilities, next_tokens
from kenotron.generation.text import StopStrings, TextStream
from kenotron.models.decoder import Decoder
from kenotron.text.tokenizer import TextTokenizer, end_of_text

StoppedBy = Literal["eos", "stop", "max_new_tokens", "max_position_embeddings", "non_finite_logits"]
Prompt = str | Sequence[int]
DEFAULTS = SamplingOptions()


@dataclass(frozen=True)
class Completion:
    """The continuation of a prompt. `tokens` are the new ones, including an end-of-text token or a stop string's.

    `text` is their text before that end. `logprobs`, if requested, has the log-probability of each token.
    """

    prompt: str
    text: str
    tokens: list[int]
    stopped_by: StoppedBy
    logprobs: list[float] | None = None


class DecodingRow:
    """A prompt being continued. `index` is its index among all prompts, `tokens` and `text` are the new ones so far.

    At most `most_new` tokens may be added; `stops_early`: this is less than max_new_tokens.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        tokenizer: TextTokenizer | None,
        config: DecoderArchitecture,
        sampling: SamplingOptions,
    ) -> None:
        """Raise InputError for a prompt that the model cannot read."""
        tokens = _prompt_tokens(f"prompt {index + 1}", prompt, tokenizer, config)
        room = config.longest_text - len(tokens)
        self.index, self.prompt_tokens = index, tokens
        self.prompt = prompt if isinstance(prompt, str) else tokenizer.decode(tokens) if tokenizer else ""
        self.most_new, self.stops_early = min(sampling.max_new_tokens, room), sampling.max_new_tokens > room
        self.stream = TextStream(tokenizer, tokens) if tokenizer else None
        self.stops = StopStrings(sampling.stop)
        self.tokens, self.logprobs, self.text = list[int](), list[float](), ""
        self.stopped_by: StoppedBy | None = None

    @property
    def position(self) -> int:
        """The position of the next token."""
        return len(self.prompt_tokens) + len(self.tokens)


def generate(
    model: Decoder | ModelOnRanks,
    tokenizer: TextTokenizer | None,
    prompts: Sequence[Prompt],
    sampling: SamplingOptions = DEFAULTS,
    *,
    batch_size: int = 8,
    stream: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continue every prompt, a text or a list of token ids, and return the completions in order.

    `stream` is called with (index of the prompt, new text) as text is generated; the joined pieces are the completion's
    text. `model` may be one that is being trained: it is in eval mode meanwhile. Without a tokenizer, prompts are ids,
    texts stay empty, and the config's eos_token_id ends them; with one, `ends_of_text` do.

    For a `ModelOnRanks`, all its ranks call this with the same arguments except `stream`, and get all completions.
    `stream` receives this replica's texts as they are generated, and the other replicas' at the end.

    Raises InputError for stop strings without a tokenizer, a prompt longer than max_position_embeddings, or a token
    outside the vocabulary.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size: expected an integer of 1 or more, found {batch_size!r:.60}")
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
        raise InputError(f"prompts: expected a list of texts and lists of token ids, found {prompts!r:.60}")
    if sampling.stop and tokenizer is None:
        raise InputError(f"stop: there is no tokenizer here, so no text in which {sampling.stop[0]!r} could appear")
    ranks = model if isinstance(model, ModelOnRanks) else ModelOnRanks.alone(model)
    ends = ends_of_text(tokenizer, ranks.config) if sampling.stop_at_eos else frozenset()
    rows = [DecodingRow(index, prompt, tokenizer, ranks.config, sampling) for index, prompt in enumerate(prompts)]
    mine = ranks.share(rows)
    # The angles of dynamic RoPE depend on the longest text of a batch, so rows are decoded one at a time.
    together = 1 if ranks.config.depends_on_longest else batch_size
    with ranks.evaluating(), _without_gradients(ranks.parts):
        for first in range(0, len(mine), together):
            _complete(ranks, mine[first : first + together], sampling, ends, stream)
    done = ranks.gather([_completion(row, sampling.logprobs) for row in mine])
    if stream is not None:
        here = {row.index for row in mine}
        for index, completion in enumerate(done):
            if index not in here and completion.text:
                stream(index, completion.text)
    return done


def _without_gradients(parts: Sequence[Decoder]) -> AbstractContextManager[object]:
    """Return inference mode, or for weights that are being trained, no_grad.

    Inference mode saves autograd's bookkeeping, a tenth of a step of a small model, but a backward pass cannot use
    tensors that it leaves in a model, such as RoPE's tables.
    """
    trained = any(parameter.requires_grad for part in parts for parameter in part.parameters())
    return torch.no_grad() if trained else torch.inference_mode()


def _complete(
    ranks: ModelOnRanks,
    rows: Sequence[DecodingRow],
    sampling: SamplingOptions,
    ends: frozenset[int],
    stream: Callable[[int, str], None] | None,
) -> None:
    """Generate the tokens of one batch's rows."""
    cache = KVCache(len(rows), max(row.position + row.most_new for row in rows), ranks.device)
    tokens = [token for row in rows for token in row.prompt_tokens]
    ctx = cache.prefill([row.position for row in rows])
    while True:
        logits = ranks.logits(torch.tensor(tokens, device=ranks.device), ctx)
        chosen = None
        if logits is not None:
            requests, positions = [row.index for row in rows], [row.position for row in rows]
            penalized = sampling.repetition_penalty != 1
            texts = [row.prompt_tokens + row.tokens for row in rows] if penalized else ()
            chosen = next_tokens(logits, sampling, requests, positions, texts)
        if sampling.logprobs:
            found = None if logits is None or chosen is None else log_probabilities(logits, chosen)
            for row, logprob in zip(rows, ranks.agree(found, len(rows), torch.float64)):
                row.logprobs.append(logprob)
        for row, token in zip(rows, ranks.agree(chosen, len(rows))):
            _append(row, token, ends, stream)
        alive = [number for number, row in enumerate(rows) if row.stopped_by is None]
        if not alive:
            return
        if len(alive) < len(rows):
            cache.keep(alive)
            rows = [rows[number] for number in alive]
        if ranks.config.depends_on_longest and rows[0].position > (
            getattr(ranks.config, "max_position_embeddings", None) or 0
        ):
            # The angles of all keys depend on the length, so no key can be cached: every token reads the whole text.
            tokens, ctx = rows[0].prompt_tokens + rows[0].tokens, cache.prefill([rows[0].position])
        else:
            tokens = [row.tokens[-1] for row in rows]
            ctx = cache.step([row.position - 1 for row in rows])


def _append(row: DecodingRow, token: int, ends: frozenset[int], stream: Callable[[int, str], None] | None) -> None:
    """Append the next token to a row, and pass the text that it completes to `stream`."""
    if token == NOT_FINITE:
        row.stopped_by = "non_finite_logits"
    else:
        row.tokens.append(token)
        limited: StoppedBy = "max_position_embeddings" if row.stops_early else "max_new_tokens"
        row.stopped_by = "eos" if token in ends else limited if len(row.tokens) == row.most_new else None
    if row.stream is None:
        return
    piece = row.stream.push(token) if token != NOT_FINITE and token not in ends else ""
    if row.stopped_by is not None:
        piece += row.stream.finish()
    piece = row.stops.push(piece)
    if row.stops.found:
        row.stopped_by = "stop"
    elif row.stopped_by is not None:
        piece += row.stops.finish()
    row.text += piece
    if stream is not None and piece:
        stream(row.index, piece)


def _completion(row: DecodingRow, logprobs: bool) -> Completion:
    found = row.logprobs[: len(row.tokens)] if logprobs else None  # broken logits have a number but no token
    return Completion(row.prompt, row.text, row.tokens, row.stopped_by or "max_new_tokens", found)


def _prompt_tokens(
    where: str, prompt: Prompt, tokenizer: TextTokenizer | None, config: DecoderArchitecture
) -> list[int]:
    """Return the tokens of a prompt, after checking them."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
    if not isinstance(prompt, str) and not (listed and all(isinstance(token, Integral) for token in prompt)):
        raise InputError(f"{where}: expected a text or a list of token ids, found {prompt!r:.60}")
    if isinstance(prompt, str) and tokenizer is None:
        raise InputError(f"{where}: there is no tokenizer here, so a prompt must be token ids, not text")
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) and tokenizer else [int(t) for t in prompt]
    if not tokens:  # an empty text: use the token that starts a document
        bos = tokenizer.bos_token_id if tokenizer else config.bos_token_id
        tokens = [end_of_text(tokenizer, config) if bos is None else bos]
    outside = next((token for token in tokens if not 0 <= token < config.vocab_size), None)
    if outside is not None:
        raise InputError(f"{where}: token {outside} is outside the model's vocabulary of {config.vocab_size}")
    limit = config.longest_text
    if len(tokens) >= limit:
        raise InputError(
            f"{where}: {len(tokens)} tokens leave no room for a new one; the model reads at most {limit} "
            "(max_position_embeddings)"
        )
    return tokens


def ends_of_text(tokenizer: TextTokenizer | None, config: DecoderArchitecture) -> frozenset[int]:
    """Return the tokens that end a text: `end_of_text`, and those in a Hugging Face model's files.

    The files of Llama 3.2 and Qwen, beside the tokenizer, name several, of which the tokenizer has one.
    """
    ends = {end_of_text(tokenizer, config)}
    folder = getattr(tokenizer, "folder", None)
    for file in [Path(folder, name) for name in ("generation_config.json", "config.json")] if folder else ():
        try:
            named = json.loads(file.read_text(encoding="utf-8"))["eos_token_id"]
        except (OSError, ValueError, LookupError, TypeError):  # there may be none
            continue
        ends |= {token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)}
    return frozenset(ends)
