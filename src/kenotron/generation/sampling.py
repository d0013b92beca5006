"""Choose the next token from logits: greedily, or sampled with temperature, top-k, top-p and min-p.

The order is that of `transformers`: repetition penalty (Keskar et al. 2019, arXiv 1909.05858), temperature, top-k,
top-p (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751), min-p (Nguyen et al. 2024, arXiv 2407.01082). With
probabilities 0.5, 0.3, 0.15, 0.05 and top_p 0.7, the smallest set that reaches 0.7 is the first two, so the next token
is drawn from 0.625, 0.375; with min_p 0.2 it is drawn from tokens of at least 0.2 x 0.5, the first three.

The random number is a function of (seed, request, position), so a request gives the same text in any batch, and torch's
global generators are never used.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kenotron.generation.options import SamplingOptions
from kenotron.kernels.hashing import derive_key, uniform_array

NOT_FINITE = -1  # returned instead of a token if the logits have NaN or infinity


def next_tokens(
    logits: Tensor,
    sampling: SamplingOptions,
    requests: Sequence[int],
    positions: Sequence[int],
    texts: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Return the next token of every row of logits ``[rows, vocab]``, or `NOT_FINITE` if its logits are broken.

    `requests` are the rows' indices among all prompts, `positions` the new tokens' positions. `texts` are the rows'
    tokens so far, for the repetition penalty; without them there is no penalty.
    """
    logits = logits.float()
    finite = logits.sum(-1).isfinite()  # one pass; isfinite of every logit is 20 times as slow on a CPU
    if texts:
        logits = penalized(logits, texts, sampling.repetition_penalty)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)
    else:
        drawn = [uniform(sampling.seed, request, position) for request, position in zip(requests, positions)]
        probabilities = cut(logits, sampling).softmax(-1)
        chosen = draw(probabilities, torch.tensor(drawn, dtype=torch.float64, device=logits.device))
    return torch.where(finite, chosen, NOT_FINITE).tolist()


def penalized(logits: Tensor, texts: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Return fp32 logits ``[rows, vocab]``; tokens x of the row's text become x / penalty, or x * penalty if x < 0."""
    used = torch.zeros_like(logits, dtype=torch.bool)
    for row, text in enumerate(texts):
        used[row, torch.tensor(text, device=logits.device)] = True
    return torch.where(used, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def log_probabilities(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """Return the model's log-probability of each row's token, before penalty, temperature and cuts."""
    chosen = torch.tensor(tokens, device=logits.device).clamp_min(0)  # for NOT_FINITE the result is NaN anyway
    return logits.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()


def cut(logits: Tensor, sampling: SamplingOptions) -> Tensor:
    """Return fp32 logits ``[rows, vocab]`` divided by the temperature, with -inf where top-k, top-p or min-p cut."""
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)  # ties with the k-th stay
    if sampling.top_p < 1:
        ascending, order = logits.sort(dim=-1)
        tail = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        tail[:, -1] = False  # the most likely token always stays
        logits = logits.masked_fill(tail.scatter(-1, order, tail), -torch.inf)
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        least = sampling.min_p * probabilities.amax(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the uniform number (inverse transform sampling).

    probabilities ``[rows, vocab]`` need not sum to exactly one; uniforms ``[rows]`` in [0, 1). A token of
    probability 0 is never drawn.
    """
    cumulated = probabilities.double().cumsum(-1)
    total = cumulated[:, -1:]
    # A product rounded up to the total would exceed every entry.
    target = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target, right=True)[:, 0]


def uniform(seed: int, request: int, position: int) -> float:
    """Return the number in [0, 1) of this position of this request."""
    return float(uniform_array(derive_key("sample", seed, request), np.array([position]))[0])
