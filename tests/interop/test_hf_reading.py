"""Whatever a config.json says, we build the model that transformers makes of the file, or refuse it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kenotron.config.errors import InputError
from kenotron.interop.hf_config import architecture_from_hf, hf_config
from kenotron.models.foreign import HuggingFaceArchitecture
from support.families import FAMILIES, hf_model
from support.tiny_llamas import random_tokens

# Keys of one family or another, with a value that changes what a model computes that reads them.
KEYS_OF_OTHERS: dict[str, Any] = yaml.safe_load("""
    {attention_bias: true, attention_multiplier: 3.0, attn_logit_softcapping: 0.5, clip_qkv: 0.01,
    decoder_sparse_step: 2, embedding_multiplier: 3.0, final_logit_softcapping: 0.5, first_k_dense_replace: 2,
    head_dim: 64, hidden_activation: gelu, is_causal: false, layer_types: [sliding_attention, full_attention],
    logit_scale: 0.1, logits_scaling: 7.0, mlp_bias: true, mlp_only_layers: [1], moe_layer_freq: 2,
    no_rope_layers: [0, 1], norm_topk_prob: true, partial_rotary_factor: 0.5, qk_layernorm: true, qkv_bias: true,
    query_pre_attn_scalar: 3, residual_multiplier: 0.1, rope_interleave: false, rope_local_base_freq: 300.0,
    rotary_emb_base: 100, rotary_pct: 0.5, routed_scaling_factor: 3.0, scoring_func: softmax, sliding_window: 5,
    tie_word_embeddings: true, use_bias: true, use_parallel_residual: false, use_qk_norm: true,
    use_sliding_window: true}
""")


def content(which: str) -> dict[str, Any]:
    """A config.json of this family."""
    config = hf_model(which).config
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(hf_model(which)).__name__]}


def alterations(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, another value): every flag the other way and null, every number null, and keys of other families."""
    for key, value in config.items():
        if isinstance(value, bool):
            yield key, not value
        if isinstance(value, bool | int | float | list):
            yield key, None
    yield from ((key, value) for key, value in KEYS_OF_OTHERS.items() if config.get(key) != value)


def of_the_file(content: dict[str, Any], folder: Path) -> PreTrainedModel | None:
    """What transformers makes of it; None if it raises."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    try:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").eval()
    except Exception:  # its checks raise many types
        return None


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of weights that are a function of their names and shapes."""
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        parameter.data = torch.randn(parameter.shape, generator=draw) * (0.1 if "norm" in name else 0.3)
    model.config.return_dict = True  # the form of the output is none of ours
    with torch.no_grad():
        return model(random_tokens(1, 40)).logits


def difference(changed: dict[str, Any], folder: Path) -> float | None:
    """Of the logits of what we read from those of transformers, relative; None if one of the two refuses the file."""
    theirs = of_the_file(changed, folder)
    try:
        section = architecture_from_hf(changed, "config.json")
    except InputError:
        return None
    if theirs is None or isinstance(section, HuggingFaceArchitecture):
        return None
    ours = AutoModelForCausalLM.from_config(hf_config(section, "float32", 2), attn_implementation="eager").eval()
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    try:
        expected = logits(theirs)
    except RuntimeError:  # OLMoE with heads of another width
        return None
    return ((logits(ours) - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(
    ("which", "changes", "said"),
    [
        ("llama", {"is_causal": False}, "is_causal: False; expected True"),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}, "layer_types"),
        ("deepseek_v3", {"head_dim": 64}, "head_dim: 64; expected 4"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": None}, "sliding_window"),
        ("mistral", {"num_key_value_heads": None}, "num_key_value_heads"),
    ],
)
def test_a_key_that_transformers_reads_and_we_do_not_is_refused(which: str, changes: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        print(architecture_from_hf(content(which) | changes, "config.json"))


@pytest.mark.parametrize(
    ("which", "changes"),
    [
        ("llama", {"rotary_emb_base": 100, "clip_qkv": 0.1, "qk_layernorm": True}),
        ("deepseek_v3", {"norm_topk_prob": None}),
        ("deepseek_v3", {"rope_interleave": None}),
        ("qwen2", {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_nulls_and_keys_of_others_mean_what_they_mean_to_transformers(which: str, changes: Any, tmp_path: Path) -> None:
    assert difference(content(which) | changes, tmp_path) == 0


def test_a_mistral_with_kinds_of_layers_is_the_model_that_transformers_picks(tmp_path: Path) -> None:
    changes = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    config = content("mistral") | changes
    section = architecture_from_hf(config, "config.json")
    assert isinstance(section, HuggingFaceArchitecture)
    theirs = of_the_file(config, tmp_path)
    assert theirs is not None
    ours = AutoModelForCausalLM.from_config(hf_config(section, "float32", 2), attn_implementation="eager").eval()
    assert type(ours) is type(theirs)
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("which", [which for which in FAMILIES if "nano" not in which and "llamoe" not in which])
def test_no_altered_file_is_read_as_another_model(which: str, tmp_path: Path) -> None:
    plain = content(which)
    assert difference(plain, tmp_path) == 0
    found = {(key, str(value)): difference(plain | {key: value}, tmp_path) for key, value in alterations(plain)}
    assert {case: each for case, each in found.items() if each} == {}
    assert sum(each == 0 for each in found.values()) > 10
