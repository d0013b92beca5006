"""Log-likelihoods of continuations against a float64 softmax over each sequence's own logits, without packing."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.config import load
from kenotron.evaluation import scoring
from kenotron.evaluation.scoring import Pair, longest_input
from support.tiny_llamas import SHAPES, VARIANTS, fresh_model, our_config, our_logits, our_model

log_likelihoods = partial(scoring.log_likelihoods, report=print)
PAIRS: list[Pair] = [
    ([5, 9, 1], [7]),
    ([5, 9, 1], [8]),  # shares its input with the first
    ([5, 9, 1], [7, 250, 3]),
    ([2], [4, 4, 4, 4, 4]),
    (list(range(40, 52)), [1, 299]),
    ([5, 9, 1, 7, 250], [3]),  # the same tokens as the third, another border
]


def expected(model: torch.nn.Module, context: Any, continuation: Any) -> float:
    """By the definition, from the logits of this sequence alone."""
    tokens = [*context, *continuation]
    logs = our_logits(model, torch.tensor([tokens]))[0].double().log_softmax(-1)
    first = len(context)
    return math.fsum(float(logs[place - 1, tokens[place]]) for place in range(first, len(tokens)))


@pytest.mark.parametrize("batch_size", [1, 2, 64])
@pytest.mark.parametrize("variant", ["grouped_query", "tied", "dynamic", "yarn"])
def test_each_is_what_the_sequence_alone_says(variant: str, batch_size: int, tmp_path: Path) -> None:
    model = our_model(tmp_path, **VARIANTS[variant])
    found = [each.log_likelihood for each in log_likelihoods(model, PAIRS, batch_size)]
    assert found == pytest.approx([expected(model, *pair) for pair in PAIRS], abs=2e-5, rel=0)


MAMBA = {"is_mamba2_config": True, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 4, "chunk_size": 4}


def test_packed_sequences_of_a_recurrent_model_begin_afresh(tmp_path: Path) -> None:
    shape = {name: SHAPES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = our_config(tmp_path)
    config["model"]["model_config"] = shape | MAMBA
    model = fresh_model(config).eval()
    assert longest_input(load(config).model.decoder) == 2048
    found = log_likelihoods(model, PAIRS, 64)
    alone = [log_likelihoods(model, [pair], 1)[0].log_likelihood for pair in PAIRS]
    assert [each.log_likelihood for each in found] == pytest.approx(alone, abs=2e-5, rel=0)
    assert len({round(each, 3) for each in alone}) == len(alone)


def test_greedy_is_what_the_model_would_write(tmp_path: Path) -> None:
    model = our_model(tmp_path)
    text = [5, 9, 1]
    for _ in range(3):
        text.append(int(our_logits(model, torch.tensor([text]))[0, -1].argmax()))
    other = [*text[3:5], (text[5] + 1) % 300]
    found = log_likelihoods(model, [(text[:3], text[3:]), (text[:3], other)], 8)
    assert [each.is_greedy for each in found] == [True, False]


def test_of_a_text_that_is_too_long_the_beginning_is_cut(tmp_path: Path) -> None:
    model = our_model(tmp_path, max_position_embeddings=8)
    tokens = list(range(20, 40))
    found = log_likelihoods(model, [(tokens[:17], tokens[17:])], 8)
    assert found[0].log_likelihood == pytest.approx(expected(model, tokens[11:17], tokens[17:]), abs=2e-5)


def test_few_logits_at_once_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_model(tmp_path)
    whole = [each.log_likelihood for each in log_likelihoods(model, PAIRS, 64)]
    monkeypatch.setattr(scoring, "MOST_LOGITS", 3 * SHAPES["vocab_size"])
    assert [each.log_likelihood for each in log_likelihoods(model, PAIRS, 64)] == pytest.approx(whole, abs=2e-5)
