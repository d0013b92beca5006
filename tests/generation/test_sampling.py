"""Sampling against transformers' own processors and against float64 formulas."""

import inspect
from dataclasses import fields

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st

import kenotron as kn
from kenotron.cli import chat as chat_command
from kenotron.cli import generate as generate_command
from kenotron.config.errors import InputError
from kenotron.generation import SamplingOptions
from kenotron.generation.sampling import NOT_FINITE, cut, draw, log_probabilities, next_tokens, penalized

logit_rows = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=2, max_size=12)  # ties are likely
LARGEST = 1 - 2**-53  # uniform number in float64


@given(
    logit_rows,
    st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    st.integers(0, 13),
    st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]),
)
def test_the_cuts_are_those_of_transformers_in_its_order(row, temperature, top_k, top_p, min_p):
    logits = torch.tensor([row])
    found = cut(logits, SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(found, cut_by_transformers(logits, temperature, top_k, top_p, min_p))


def cut_by_transformers(logits, temperature, top_k, top_p, min_p=0.0):
    theirs = transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(transformers.TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(transformers.TopPLogitsWarper(top_p))
    if min_p:
        theirs.append(transformers.MinPLogitsWarper(min_p))
    return theirs(torch.zeros(1, 1, dtype=torch.long), logits.clone())


@given(logit_rows, st.lists(st.integers(0, 1), min_size=1, max_size=5), st.sampled_from([0.5, 1.0, 1.2, 3.0]))
def test_the_repetition_penalty_is_that_of_transformers(row, text, penalty):
    logits = torch.tensor([row, row[::-1]])
    texts, theirs = [text, [0]], transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = [theirs(torch.tensor([ids]), logits[row : row + 1].clone()) for row, ids in enumerate(texts)]
    assert torch.equal(penalized(logits, texts, penalty), torch.cat(expected))
    greedy = next_tokens(logits, SamplingOptions(repetition_penalty=penalty), [0, 1], [9, 9], texts)
    assert greedy == torch.cat(expected).argmax(-1).tolist()


def test_log_probabilities_are_those_of_the_float64_formula_without_cuts_or_temperature():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)) * 5
    exact = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
    found = log_probabilities(logits, [3, 0, 29, 7])
    assert np.allclose(found, [float(exact[row, token].log()) for row, token in enumerate([3, 0, 29, 7])], atol=1e-6)
    logits[0, 5] = float("nan")
    assert np.isnan(log_probabilities(logits, [NOT_FINITE, 0, 29, 7])[0])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.3, 0, 0.8), (0.9, 6, 0.9)])
def test_drawn_tokens_have_the_frequencies_of_transformers_cuts(temperature, top_k, top_p):
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.5, 0.0, -2.0, 1.1, 0.2, -0.4, 0.9]])
    draws = 20_000
    sampling = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=3)
    drawn = next_tokens(logits.expand(draws, -1), sampling, range(draws), [7] * draws)
    expected = cut_by_transformers(logits.double(), temperature, top_k, top_p)[0].softmax(-1).numpy()
    found = np.bincount(drawn, minlength=10) / draws
    assert (found[expected == 0] == 0).all()
    deviation = np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(found - expected) <= 4.5 * deviation).all()


@given(
    st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.25, 1e-30, 0.7]), min_size=1, max_size=8).filter(any),
    st.floats(0, 1, exclude_max=True),
)
@example([0.3, 0.7, 0.0], LARGEST)
@example([0.1, 0.0, 0.0], LARGEST)
def test_a_draw_inverts_the_distribution_function_and_never_gives_an_impossible_token(row, uniform):
    probabilities = torch.tensor([row])
    token = int(draw(probabilities, torch.tensor([uniform], dtype=torch.float64)))
    exact = probabilities[0].double().numpy()
    assert exact[token] > 0
    below = exact[:token].sum() / exact.sum()
    upto = exact[: token + 1].sum() / exact.sum()
    assert below - 1e-12 <= uniform <= upto + 1e-12


def test_a_draw_depends_on_seed_request_and_position_and_on_nothing_else():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    sampling = SamplingOptions(temperature=1.0, seed=5)
    alone = [next_tokens(logits, sampling, [r], [p])[0] for r in range(6) for p in range(6)]
    together = next_tokens(logits.expand(36, -1), sampling, [r for r in range(6) for _ in range(6)], list(range(6)) * 6)
    assert alone == together
    assert len(set(alone)) > 10
    assert next_tokens(logits.expand(36, -1), SamplingOptions(temperature=1.0, seed=6), [0] * 36, range(36)) != together


def test_a_tiny_top_p_keeps_the_likeliest_token():
    """1 minus it is 1 in float32: nothing exceeds that."""
    logits = torch.tensor([[0.1, 3.0, 2.0], [5.0, 1.0, 1.0]])
    assert next_tokens(logits, SamplingOptions(temperature=1.0, top_p=1e-9), [0, 1], [0, 0]) == [1, 0]


def test_logits_that_are_not_finite_give_no_token():
    logits = torch.tensor([[0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [0.0, 1.0, 2.0]])
    assert next_tokens(logits, SamplingOptions(), [0, 1, 2], [0, 0, 0]) == [NOT_FINITE, NOT_FINITE, 2]
    assert next_tokens(logits, SamplingOptions(temperature=1.0), [0, 1, 2], [0, 0, 0])[:2] == [NOT_FINITE, NOT_FINITE]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 or more, found 0"),
        ({"stop": ["x", ""]}, "stop: expected texts, found an empty one"),
        ({"stop": [5]}, r"stop: expected a list of texts, found \[5\]"),
        ({"max_new_tokens": "5"}, "max_new_tokens: expected an integer, found '5'"),
        ({"temperature": True}, "temperature: expected a number, found True"),
        ({"logprobs": "no"}, "logprobs: expected True or False, found 'no'"),
        ({"min_p": 0.1}, "min_p: changes nothing at temperature 0"),
    ],
)
def test_a_setting_out_of_range_or_without_effect_is_named(values, name):
    with pytest.raises(InputError, match=f"^{name}"):
        SamplingOptions(**values)


def test_every_way_to_generate_has_every_option_with_its_default():
    defaults = {field.name: field.default for field in fields(SamplingOptions)}
    ways = (kn.generate, generate_command.generate, chat_command.chat)
    python, generate, chat = ({n: p.default for n, p in inspect.signature(way).parameters.items()} for way in ways)
    assert defaults.items() <= python.items()
    of_commands = defaults | {"stop": None}  # an option that can be repeated has no tuple for a default
    assert of_commands.items() <= (generate | {"stop_at_eos": generate["eos_stop"]}).items()
    of_chat = set(defaults) - {"stop_at_eos", "logprobs"}  # an answer ends with its turn, and is printed as text
    assert {name: chat[name] for name in of_chat} == {name: of_commands[name] for name in of_chat} | {
        "max_new_tokens": 512
    }
