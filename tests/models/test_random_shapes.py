"""Families compute what transformers computes in whatever shape: few heads or many, windows, scalings, experts."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from support.families import hf_model, ours_of
from support.tiny_llamas import VARIANTS, our_logits, random_tokens

OWN_HEAD_DIM = ("llama", "mistral", "qwen3", "olmo2", "nano", "mixtral", "qwen3_moe")
HEADS_TOGETHER = ("qwen2", "smollm3", "starcoder2", "gpt_neox", "olmoe", "qwen2_moe")  # as wide as the model

WINDOWED = ("mistral", "mixtral", "starcoder2")
# The names of their number.
EXPERTS = {"mixtral": "num_local_experts"} | dict.fromkeys(("olmoe", "qwen2_moe", "qwen3_moe"), "num_experts")
SCALINGS = [{"rope_type": "default"}, *(VARIANTS[each]["rope_scaling"] for each in ("linear", "yarn", "llama3"))]


@st.composite
def models(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A family, and shapes for it in the words of config.json."""
    which = draw(st.sampled_from([*OWN_HEAD_DIM, *HEADS_TOGETHER, "deepseek_v3"]))
    heads = draw(st.integers(1, 6))
    groups = [heads // each for each in range(1, heads + 1) if heads % each == 0]
    shapes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads if which in ("gpt_neox", "deepseek_v3") else draw(st.sampled_from(groups)),
        "num_hidden_layers": draw(st.integers(2 if which == "deepseek_v3" else 1, 3)),  # whose first is dense
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(3, 90)),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": {"rope_theta": draw(st.sampled_from([50.0, 10_000.0])), **draw(st.sampled_from(SCALINGS))},
    }
    shapes["hidden_size"] = heads * draw(st.sampled_from([2, 4, 10]))
    if which in (*EXPERTS, "deepseek_v3"):  # transformers' grouped products take multiples of 16 bytes
        shapes["hidden_size"] *= 2
        shapes["intermediate_size"] = 4 * draw(st.integers(1, 10))
    if which in WINDOWED:
        shapes["sliding_window"] = draw(st.none() | st.integers(1, 24))
    if which in EXPERTS:
        shapes[EXPERTS[which]] = draw(st.integers(1, 9))
        shapes["num_experts_per_tok"] = draw(st.integers(1, shapes[EXPERTS[which]]))
    if which in OWN_HEAD_DIM:
        shapes["head_dim"] = draw(st.sampled_from([2, 4, 10]))
    if which == "gpt_neox":
        shapes["rope_parameters"]["partial_rotary_factor"] = 0.5
        shapes["hidden_size"] = 4 * heads * draw(st.integers(1, 3))  # half of a head is rotated, in pairs
    return which, shapes


@given(models(), st.integers(1, 2), st.integers(1, 20))
def test_logits_are_those_of_transformers(model: tuple[str, dict[str, Any]], sequences: int, length: int) -> None:
    which, shapes = model
    theirs = hf_model(which, **shapes)
    tokens = random_tokens(sequences, length) % shapes["vocab_size"]
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = our_logits(ours_of(theirs), tokens)
    assert float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)) < 1e-4
