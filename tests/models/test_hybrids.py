"""Hybrids of Mamba-2 and attention beyond what every family is compared by: patterns, documents, bounds, costs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mamba import KEYS as MAMBAS
from test_mamba import config_of as config_with

from kenotron.config import load
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.interop.hf_config import architecture_from_hf, hf_config
from kenotron.models import flops_per_token
from kenotron.models.decoder import Decoder
from kenotron.models.families.nemotron_h import KINDS, NemotronHArchitecture
from support.families import filled, hf_model, in_our_names_of, ours_of
from support.tiny_llamas import expect_documents_apart, fresh_model, our_logits, random_tokens

KEYS = yaml.safe_load("""{is_nemotron_h_config: true, hybrid_override_pattern: 'M*-M', num_hidden_layers: 4,
    hidden_size: 32, intermediate_size: 48, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16,
    mamba_num_heads: 8, mamba_head_dim: 8, n_groups: 2, ssm_state_size: 16, vocab_size: 300}""")


PATTERN = "hybrid_override_pattern"


def config_of(root: Path, **changes: Any) -> dict[str, Any]:
    """A whole config in YAML's keys, with these changes of a small hybrid."""
    return config_with(root, **KEYS | changes)


def pair_of(pattern: str, **changes: Any) -> tuple[Any, Decoder]:
    """A random model of transformers with layers of this pattern, and ours (with use_cache theirs wants attention)."""
    theirs = hf_model("nemotron_h", num_hidden_layers=len(pattern), hybrid_override_pattern=pattern, **changes)
    return theirs, ours_of(theirs)


# ---- patterns ----------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(pattern=st.text("".join(KINDS), min_size=1, max_size=6))
def test_any_pattern_computes_what_transformers_computes(pattern: str) -> None:
    theirs, ours = pair_of(pattern)
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
    assert torch.allclose(our_logits(ours, tokens), expected, atol=1e-4 * expected.abs().max().item())
    written = hf_config(ours.config, "float32", 0)
    assert written.hybrid_override_pattern == pattern
    assert architecture_from_hf(written.to_dict(), "config.json") == ours.config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({PATTERN: "M*xM"}, rf"{PATTERN}: expected letters among M, \*, -, E, found 'x' in 'M\*xM'"),
        ({PATTERN: "M*EM", "mlp_bias": True}, "mlp_bias: expected false with layers of experts"),
        ({PATTERN: "M*EM", "n_group": 3}, "n_group: expected a divisor of n_routed_experts 8, found 3"),
        ({PATTERN: "M*-"}, rf"{PATTERN}: expected a letter for each of num_hidden_layers 4, found 3 in 'M\*-'"),
        ({PATTERN: ""}, f"{PATTERN}: expected"),
        ({"n_groups": 3}, "n_groups: expected a divisor of mamba_num_heads 8, found 3"),
        ({"time_step_max": 1e-4}, "time_step_max: expected at least time_step_min"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected false"),
        ({"head_dim": None, "hidden_size": 30}, "num_attention_heads: expected a divisor of hidden_size 30, found 4"),
    ],
)
def test_what_does_not_describe_the_layers_is_named_in_one_line(changes, said, tmp_path):
    with pytest.raises(InputError, match=said) as caught:
        load(config_of(tmp_path, **changes))
    assert len(str(caught.value).splitlines()) == 1


def test_names_of_layers_that_files_have_or_had_are_read() -> None:
    config = hf_model("nemotron_h").config.to_dict() | {"architectures": ["NemotronHForCausalLM"]}
    assert config["layers_block_type"] == ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]
    found = architecture_from_hf(config, "config.json")
    assert isinstance(found, NemotronHArchitecture)
    assert found.hybrid_override_pattern == "M-M*-"
    older = {name: value for name, value in config.items() if name != "layers_block_type"}
    assert architecture_from_hf(older | {"hybrid_override_pattern": "M-M*-"}, "config.json") == found
    old_names = ["mamba", "mlp", "mamba", "attention", "mlp"]
    assert architecture_from_hf(older | {"layers_block_type": old_names}, "config.json") == found
    without = {name: value for name, value in config.items() if name != "head_dim"}
    assert architecture_from_hf(without, "config.json").head_dim == type(hf_model("nemotron_h").config)().head_dim
    with pytest.raises(InputError, match=r"hybrid_override_pattern: expected letters among .* found '\?'"):
        architecture_from_hf(config | {"layers_block_type": ["linear_attention", "sliding_attention"]}, "config.json")
    for key in ("moe_latent_size", "sliding_window"):
        with pytest.raises(NotSupportedYet, match=f"{key}: 8"):
            architecture_from_hf(config | {key: 8}, "config.json")


# ---- maths -------------------------------------------------------------------------------------------------


def test_the_smallest_time_step_is_that_of_transformers() -> None:
    theirs, ours = pair_of("MM", time_step_min=0.9, time_step_max=1.0)
    tokens = random_tokens(2, 17)
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
    assert torch.allclose(our_logits(ours, tokens), expected, atol=1e-4)
    free = Decoder(ours.config.model_copy(update={"time_step_min": 1e-5}))
    filled(free, in_our_names_of(free, theirs.state_dict()))
    assert not torch.allclose(our_logits(free, tokens), expected, atol=1e-2)


@pytest.mark.parametrize("which", ["nemotron_h", "nemotron_h_biased", "mamba", "mamba2"])
def test_documents_of_a_sequence_do_not_see_each_other(which: str) -> None:
    expect_documents_apart(ours_of(hf_model(which)))


@pytest.mark.parametrize("keys", [KEYS, MAMBAS["mamba"]], ids=["hybrid", "mamba"])
@pytest.mark.parametrize("wide", [True, False])
def test_hidden_states_between_layers_of_any_kind_are_fp32_where_the_config_says_so(wide, keys, tmp_path):
    model = fresh_model(config_with(tmp_path, **keys | {"residual_in_fp32": wide}))
    model.set_compute_dtype(torch.bfloat16)
    seen = []
    for block in model.model.layers.values():
        block.register_forward_hook(lambda _, given, out: seen.append(out.dtype))
        block.mixer.register_forward_hook(lambda _, given, out: seen.append((given[0].dtype, out.dtype)))
    logits = our_logits(model, random_tokens(1, 9))
    stream = torch.float32 if wide else torch.bfloat16
    assert seen == [(torch.bfloat16, torch.bfloat16), stream] * len(model.model.layers)
    assert (model.stream_dtype, logits.dtype) == (stream, torch.bfloat16)


def test_layers_with_experts_have_the_costs_of_their_keys(tmp_path: Path) -> None:
    widths = {"n_routed_experts": 6, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 40}
    shape = {"hybrid_override_pattern": "E", "num_hidden_layers": 1, "num_experts_per_tok": 3}
    model = fresh_model(config_of(tmp_path, **shape, **widths))
    assert not model.model.layers["0"].mixer.gate.e_score_correction_bias.any()
    assert flops_per_token(model, 64, causal=True) == 2 * 32 * (6 + 3 * 2 * 20 + 2 * 40 + 300)


def test_flops_are_those_of_the_matrices_the_scores_and_the_recurrence() -> None:
    hidden, wide, vocab, length = 32, 48, 300, 64
    heads, kv, width = 4, 2, 16
    inner, state, groups, recurrent_heads, reach = 64, 16, 2, 8, 4
    read = inner + 2 * groups * state
    mamba = 2 * hidden * (inner + read + recurrent_heads) + 2 * inner * hidden + 2 * read * reach + 4 * inner * state
    scores = 4 * length * heads * width / 2
    attending = 2 * hidden * (2 * heads + 2 * kv) * width + scores
    mlp = 4 * hidden * wide
    expected = 2 * mamba + attending + 2 * mlp + 2 * vocab * hidden
    assert flops_per_token(ours_of(hf_model("nemotron_h")), length, causal=True) == expected
