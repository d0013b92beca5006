"""Log-likelihoods of texts under a model, which is all that most evaluation tasks ask for.

    log_likelihoods(model, [([2, 7, 9], [4, 4])], batch_size=8)      # [(-8.1, False)]

Sequences are packed end to end like documents, so there is no padding, and only the positions whose next token is
scored get logits. Choices that differ in their last token alone (A, B, C, D) are one sequence:

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
from kenotron.generation.ranks import ModelOnRanks
from kenotron.models.decoder import Decoder
from kenotron.text.progress import Report, progress

Pair = tuple[Sequence[int], Sequence[int]]  # context, continuation
Input = tuple[tuple[int, ...], int]  # tokens, and how many of the last are scored
MOST_LOGITS = 1 << 28  # of a forward pass: 1 GiB in fp32
UNLIMITED = 2048  # tokens that a model without a limit of its own reads at once, as lm_eval has it


class Scored(NamedTuple):
    """`log_likelihood` of a continuation in nats; `is_greedy`: each token is the most likely one."""

    log_likelihood: float
    is_greedy: bool


def longest_input(config: DecoderArchitecture) -> int:
    """Tokens that a model reads at once."""
    return UNLIMITED if config.longest_text == sys.maxsize else config.longest_text


@torch.inference_mode()
def log_likelihoods(model: Decoder, pairs: Sequence[Pair], batch_size: int, report: Report) -> list[Scored]:
    """The log-likelihood of each continuation after its context, both token ids and not empty.

    Of a pair that is too long for the model, the beginning of the context is cut off. `report` gets lines about the
    progress where there is no terminal for a bar.
    """
    longest = longest_input(model.config)
    inputs: dict[Input, list[int]] = {}  # → pairs
    for number, (context, continuation) in enumerate(pairs):
        tokens = (*context, *continuation)[-(longest + 1) : -1]
        inputs.setdefault((tokens, len(continuation)), []).append(number)
    ranks = ModelOnRanks.alone(model)
    found: dict[int, Scored] = {}
    with progress("Evaluating", len(pairs), report) as update:
        for batch in _batches(sorted(inputs, key=lambda each: -len(each[0])), batch_size, model.config):
            logits = _logits(ranks, batch)
            for (tokens, scored), rows in zip(batch, logits.split([scored for _, scored in batch])):
                normalizers, best = rows.logsumexp(-1), rows.argmax(-1)
                for number in inputs[tokens, scored]:
                    labels = torch.tensor(pairs[number][1], device=rows.device)
                    each = rows.gather(-1, labels[:, None])[:, 0] - normalizers
                    found[number] = Scored(float(each.double().sum()), bool((best == labels).all()))
            update(len(found))
    return [found[number] for number in range(len(pairs))]


def _batches(inputs: Sequence[Input], batch_size: int, config: DecoderArchitecture) -> list[list[Input]]:
    """Inputs of a forward pass: at most `batch_size`, of a bounded number of logits."""
    batches: list[list[Input]] = []
    most_rows = max(1, MOST_LOGITS // config.vocab_size)
    rows = 0
    for each in inputs:
        full = not batches or len(batches[-1]) == batch_size or rows + each[1] > most_rows
        if full or config.depends_on_longest:  # dynamic RoPE: only alone is a text itself
            batches.append([])
            rows = 0
        batches[-1].append(each)
        rows += each[1]
    return batches


def _logits(ranks: ModelOnRanks, batch: Sequence[Input]) -> Tensor:
    """Logits ``[scored positions, vocab]`` in fp32, of the sequences of a batch one after the other."""
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
