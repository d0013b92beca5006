"""Variants of a key are told apart by explicit rules."""

from typing import Any

import pytest
import yaml

from kenotron.config import InputError, load, to_dict
from kenotron.config.architecture import HFArchitecture
from kenotron.config.optimizer import SGD, AdamW, CustomOptimizer, Muon
from kenotron.models.families.starcoder2 import Starcoder2Architecture

HF = {"hf_dataset_or_datasets": "org/name"}


NAMES = """qwen2 qwen3 smollm3 olmo2 gpt_neox starcoder2 mistral mixtral olmoe nano qwen2_moe qwen3_moe llamoe
    deepseek_v3 nemotron_h"""
CLASSES = """Qwen2 Qwen3 SmolLM3 Olmo2 GPTNeoX Starcoder2 Mistral Mixtral Olmoe Nano Qwen2Moe Qwen3Moe Llamoe
    DeepseekV3 NemotronH"""
FAMILIES = dict(zip(NAMES.split(), CLASSES.split(), strict=True))
MARKERS = """is_qwen2_config is_qwen3_config is_olmo2_config is_gpt_neox_config is_starcoder2_config is_mistral_config
    is_mixtral_config is_olmoe_config is_qwen2_moe_config is_qwen3_moe_config is_deepseek_v3_config
    is_nemotron_h_config"""


@pytest.mark.parametrize(
    ("keys", "variant"),
    [
        ({"is_llama_config": True}, "Llama"),
        ({"is_llama_config": False}, "Llama"),  # a marker counts by its presence
        ({}, "Llama"),
        ({"hidden_size": 64, "rope_interleaved": True}, "Llama"),
        ({"family": "llama", "hidden_size": 64}, "Llama"),
        ({"is_gpt_neox_config": True, "rotary_pct": 1.0}, "GPTNeoX"),
        ({"grouped_query": True, "num_kv_heads": 2}, "Starcoder2"),
        ({"is_smollm3_config": True, "no_rope_layers": [1, 0], "num_hidden_layers": 2}, "SmolLM3"),
        *(({"family": name}, kind) for name, kind in FAMILIES.items()),
        *(({marker: True}, FAMILIES[marker[3:-7]]) for marker in MARKERS.split()),
        ({"is_qwen3_config": True, "head_dim": 8}, "Qwen3"),
        ({"head_dim": 8}, "Llama"),
        ({"is_llamoe_config": True, "moe_num_experts": 4, "moe_capacity_factor": 1}, "Llamoe"),
        ({"moe_num_experts": 4, "pretraining_tp": 2, "hidden_act": "silu"}, "Llamoe"),
        ({"num_local_experts": 4}, "Mixtral"),
        ({"hybrid_override_pattern": "M*", "num_hidden_layers": 2}, "NemotronH"),
        ({"qk_rope_head_dim": 32}, "DeepseekV3"),
        ({"is_mistral_config": True, "sliding_window": 8}, "Mistral"),
        ({"_fused_rotary_emb": False, "_fused_rms_norm": False, "log_attn_probs": False}, "Qwen2"),
        ({"_use_qkv_packed": False, "pretraining_tp": 2}, "Qwen2"),
        ({"moe_config": {"num_experts": 4}, "_use_doc_masking": True}, "Qwen2"),
        ({"hf": "org/name"}, "HF"),
        ({"hf": "org/name", "rope_theta": 5e5}, "HF"),
    ],
)
def test_an_architecture_is_known_by_its_keys(minimal: dict[str, Any], keys: dict[str, Any], variant: str) -> None:
    minimal["model"]["model_config"] = keys
    assert type(load(minimal).model.architecture).__name__ == f"{variant}Architecture"


def test_a_starcoder2_has_nanotrons_defaults_and_names(minimal: dict[str, Any]) -> None:
    minimal["model"]["model_config"] = {"is_starcoder2_config": True}
    model = load(minimal).model.decoder
    defaults = yaml.safe_load("""{hidden_size: 2048, intermediate_size: 8192, num_hidden_layers: 24,
        num_attention_heads: 16, kv_heads: 1, vocab_size: 49280, max_position_embeddings: 4096,
        bos_token_id: 49152, eos_token_id: 49152, hidden_act: gelu_pytorch_tanh, tie_word_embeddings: true,
        attention_window: null}""")
    assert {name: getattr(model, name) for name in defaults} == defaults
    minimal["model"]["model_config"] |= yaml.safe_load("""{grouped_query: true, num_kv_heads: 4, hidden_size: 64,
        activation_function: gelu, layer_norm_epsilon: 1.0e-6, sliding_window_size: 8, intermediate_size: null}""")
    config = load(minimal)
    model = config.model.decoder
    assert isinstance(model, Starcoder2Architecture)
    assert (model.kv_heads, model.hidden_act, model.norm_epsilon) == (4, "gelu", 1e-6)
    assert (model.attention_window, model.intermediate_size) == (8, 256)
    assert load(to_dict(config)) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grouped_query": True}, "num_kv_heads: missing: grouped_query needs it"),
        ({"multi_query": True, "num_kv_heads": 2}, "multi_query: means one .*; expected false with 2 key and value"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads 16, found 3"),
    ],
)
def test_keys_of_a_starcoder2_that_do_not_fit_are_named(minimal: Any, keys: dict[str, Any], message: str) -> None:
    minimal["model"]["model_config"] = {"is_starcoder2_config": True} | keys
    with pytest.raises(InputError, match=rf"{message}"):
        load(minimal)


def test_an_override_of_hf_is_checked_like_a_llama_key(minimal: dict[str, Any]) -> None:
    minimal["model"]["model_config"] = {"hf": "org/name", "rope_theta": 1.0, "hidden_size": "big"}
    with pytest.raises(InputError, match=r"model\.model_config\.hidden_size: expected an integer, found 'big'"):
        load(minimal)


def test_an_override_that_no_family_here_has_waits_for_the_model(minimal: dict[str, Any]) -> None:
    overrides = {"n_layer": 2, "rope_theta": 1e4, "_attn_implementation": "sdpa"}
    minimal["model"]["model_config"] = {"hf": "org/name"} | overrides
    config = load(minimal)
    assert config.model.architecture == HFArchitecture(hf="org/name", overrides=overrides)
    assert to_dict(config)["model"]["model_config"] == {"hf": "org/name"} | overrides


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, SGD()),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True}, SGD(momentum=0.9, nesterov=True)),
        ({"name": "adamW"}, AdamW()),
        ({"adam_eps": 1e-8, "adam_beta1": 0.9, "adam_beta2": 0.95, "torch_adam_is_fused": True}, AdamW()),
        ({"name": "muon", "muon_ns_steps": 3, "adam_beta1": 0.8}, Muon(muon_ns_steps=3, adam_beta1=0.8)),
        ({"name": "torch.optim.Adagrad"}, CustomOptimizer(name="torch.optim.Adagrad")),
        ({"name": "rmsprop"}, CustomOptimizer(name="torch.optim.RMSprop")),
        ({"name": "Adam", "kwargs": {"eps": 1e-6}}, CustomOptimizer(name="torch.optim.Adam", kwargs={"eps": 1e-6})),
        ({"name": "my.Lion", "kwargs": {"b": 1}}, CustomOptimizer(name="my.Lion", kwargs={"b": 1})),
    ],
)
def test_an_optimizer_is_known_by_its_name(minimal: dict[str, Any], keys: dict[str, Any], expected: Any) -> None:
    minimal["optimizer"]["optimizer_factory"] = keys
    assert load(minimal).optimizer.optimizer_factory == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_folder": ["a", "b"], "dataset_weights": [1]}, r"expected one entry per folder \(2\), found 1"),
        ({"dataset_folder": ["a", "b"], "dataset_weights": [1, 0]}, r"dataset_weights\.1: expected a number above 0"),
        ({"dataset_folder": "a", "dataset_max_tokens": [0]}, r"dataset_max_tokens\.0: expected a number of at least 1"),
        ({"tokens": {"a": 0}}, r"tokens\.a: expected a number above 0, found 0"),
        ({"mixture": [{"corpus": "python-stdlib"}]}, "every dataset of a mixture needs a weight"),
        ({"mixture": [{"weight": 1, "mixture": []}]}, "expected a dataset"),
        (HF | {"sft_dataloader": True, "text_column_name": "t"}, "belongs to the variant pretrain"),
        (HF | {"sft_dataloader": False}, "sft_dataloader: expected true, found false"),
        (HF | {"text_column_name": "t", "text_files": "a"}, "'text_files' .* this is pretrain, by 'hf_dataset_or_da"),
        (HF | {"corpus": "python-stdlib"}, "'corpus' belongs to the variant corpus"),
    ],
)
def test_other_datasets_are_errors(minimal: dict[str, Any], keys: Any, message: str) -> None:
    minimal["tokenizer"] = {"tokenizer_name_or_path": "t"}
    minimal["data_stages"][0]["data"]["dataset"] = keys
    with pytest.raises(InputError, match=message):
        load(minimal)
