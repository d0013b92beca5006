"""Log-likelihoods of texts under a model, which are all that most evaluation tasks need.

    log_likelihoods(model, [([2, 7, 9], [4, 4])], batch_size=8)      # [(-8.1, False)]

Sequences are packed end to end like documents, so there is no padding, and only the positions whose next token is
scored get logits. Choices that differ only in their last token (A, B, C, D) are one sequence:

    context  2 7 9      choices  [5] [6] [8]      read once: 2 7 9      the logits after 9 serve all three
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kenotron.config.decoder import DecoderArchitecture
from kenotron.generation.kv_cache import KVCache
from kenotron.generation.model_on_ranks import ModelOnRanks
from kenotron.models.decoder import Decoder
from kenotron.text.progress import Report, progress

Pair = tuple[Sequence[int], Sequence[int]]  # context, continuation
Input = tuple[tuple[int, ...], int]  # tokens, and how many of the last are scored
MOST_LOGITS = 1 << 28  # in a forward pass: 1 GiB in fp32
UNLIMITED = 2048  # the longest input of models without a limit, as in lm_eval


class Scored(NamedTuple):
    """The `log_likelihood` of a continuation in nats; `is_greedy`: each of its tokens is the most probable one."""

    log_likelihood: float
    is_greedy: bool


def longest_input(config: DecoderArchitecture) -> int:
    """Return the number of tokens that a model can read."""
    return UNLIMITED if config.longest_text == sys.maxsize else config.longest_text


@torch.inference_mode()
def log_likelihoods(model: Decoder, pairs: Sequence[Pair], batch_size: int, report: Report) -> list[Scored]:
    """Return the log-likelihood of each continuation after its context; both are lists of token ids, and not empty.

    If a pair is too long for the model, the beginning of the context is truncated. `report` gets lines about the
    progress if there is no terminal for a bar.
    """
    longest = longest_input(model.config)
    inputs: dict[Input, list[int]] = {}  # → indices of pairs
    for number, (context, continuation) in enumerate(pairs):
        tokens = (*context, *continuation)[-(longest + 1) : -1]
        inputs.setdefault((tokens, len(continuation)), []).append(number)
    ranks = ModelOnRanks.alone(model)
    results: dict[int, Scored] = {}
    with progress("Evaluating", len(pairs), report) as update:
        for batch in _batches(sorted(inputs, key=lambda input: -len(input[0])), batch_size, model.config):
            logits = _logits(ranks, batch)
            for (tokens, scored), rows in zip(batch, logits.split([scored for _, scored in batch])):
                normalizers, best = rows.logsumexp(-1), rows.argmax(-1)
                for number in inputs[tokens, scored]:
                    labels = torch.tensor(pairs[number][1], device=rows.device)
                    logs = rows.gather(-1, labels[:, None])[:, 0] - normalizers
                    results[number] = Scored(float(logs.double().sum()), bool((best == labels).all()))
            update(len(results))
    return [results[number] for number in range(len(pairs))]


def _batches(inputs: Sequence[Input], batch_size: int, config: DecoderArchitecture) -> list[list[Input]]:
    """Group inputs into forward passes of at most `batch_size` inputs and MOST_LOGITS logits."""
    batches: list[list[Input]] = []
    most_rows = max(1, MOST_LOGITS // config.vocab_size)
    rows = 0
    for tokens, scored in inputs:
        full = not batches or len(batches[-1]) == batch_size or rows + scored > most_rows
        if full or config.depends_on_longest:  # with dynamic RoPE, results would depend on the batch
            batches.append([])
            rows = 0
        batches[-1].append((tokens, scored))
        rows += scored
    return batches


def _logits(ranks: ModelOnRanks, batch: Sequence[Input]) -> Tensor:
    """Return the logits ``[scored positions, vocab]`` of a batch's sequences, in fp32."""
    lengths = [len(tokens) for tokens, _ in batch]
    kept: list[int] = []
    end = 0
    for length, (_, scored) in zip(lengths, batch):
        end += length
        kept += range(end - scored, end)
    ctx = KVCache(len(batch), max(lengths), ranks.device, remembers=False).prefill(lengths)
    ctx = replace(ctx, logits_to_keep=torch.tensor(kept, device=ranks.device))
    logits = ranks.logits(torch.tensor([token for tokens, _ in batch for token in tokens], device=ranks.device), ctx)
    assert logits is not None, "one rank has the head"
    return logits.float()
