"""config.json and model_config, one into the other; what is not served is refused by name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, MistralConfig

from kenotron.config.decoder import ACTIVATIONS, AttentionArchitecture
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.interop import hf_architecture
from kenotron.interop.hf_config import architecture_from_hf, hf_config
from kenotron.models.families.llama import Llama, LlamaArchitecture
from support.tiny_llamas import VARIANTS, hf_llama

SMALL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


def read(**changes):
    return architecture_from_hf(SMALL | changes, "config.json")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
        {
            "rope_scaling": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
            "rope_parameters": {"rope_type": "yarn", "beta_fast": 16.0, "rope_theta": 7.0},
        },
    ],
    ids=["transformers 4", "older", "transformers 5", "both"],
)
def test_every_form_of_rope_scaling_is_read(form):
    found = read(**form)
    assert found.rope_theta == 500000.0
    assert found.rope_scaling == {"rope_type": "llama3", **LLAMA3}


def test_yarn_lengthens_texts_in_each_of_its_spellings():
    yarn = {"type": "yarn", "factor": 4.0}
    original = {"original_max_position_embeddings": 32768}
    for positions, scaling in ((32768, yarn), (32768, yarn | original), (131072, yarn | original)):
        assert read(max_position_embeddings=positions, rope_scaling=scaling).longest_text == 131072
    llama3 = {"rope_type": "llama3", **LLAMA3}
    assert read(max_position_embeddings=131072, rope_scaling=llama3).longest_text == 131072


def test_a_mistral_whose_file_has_no_window_has_that_of_transformers():
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
    assert read(**mistral).sliding_window == MistralConfig().sliding_window == 4096
    assert read(**mistral, sliding_window=None).sliding_window is None


def test_the_older_name_of_a_rope_type_is_exported_under_the_new_one():
    architecture = LlamaArchitecture(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=20000.0)
    exported = architecture_from_hf(hf_config(architecture, "float32", 2).to_dict(), "config.json")
    assert exported.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_a_file_without_theta_has_that_of_transformers():
    for model_type, theta in (("smollm3", 2000000.0), ("mixtral", 1000000.0), ("qwen2", 10000.0)):
        config = CONFIG_MAPPING[model_type]().to_dict()
        assert config["rope_parameters"].pop("rope_theta") == theta
        assert architecture_from_hf(config, "config.json").rope_theta == theta


def test_values_that_transformers_refuses_are_one_line():
    architecture = LlamaArchitecture(hidden_size=100, num_attention_heads=3, head_dim=32)
    with pytest.raises(InputError, match=r"^model\.model_config: .*hidden size.*100.*3"):
        hf_config(architecture, "float32", 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "t5"}, "'t5'; expected one of .*gpt_neox .*, llama .* or a causal language model of"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "laplace"}, "hidden_act 'laplace'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_the_maths_does_not_serve_is_refused_by_name(changes, named):
    with pytest.raises(NotSupportedYet, match=f"^not supported yet: config.json: .*{named}"):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 12, "num_attention_heads": 4}, "config.json: hidden_size: expected an even .*, found 3"),
        ({"hidden_size": None}, "config.json: hidden_size: expected an integer, found None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(changes, named):
    with pytest.raises(InputError, match=named):
        read(**changes)


def test_an_override_that_its_family_does_not_have_is_an_unknown_key():
    with pytest.raises(InputError, match=r"^unknown key 'model\.model_config\.rope_teta'; did you mean 'rope_theta'"):
        architecture_from_hf(SMALL, "config.json", overrides={"rope_teta": 1.0})


def test_heads_may_be_wider_than_their_share_of_the_hidden_size():
    assert (read(head_dim=32).head_dim, read(head_dim=16).free_head_dim, read().head_dim) == (32, None, 16)
    exported = hf_config(read(head_dim=32), "float32", 2)
    assert (exported.head_dim, hf_config(read(), "float32", 2).head_dim) == (32, 16)


def test_a_family_without_a_key_for_wide_heads_refuses_them(monkeypatch):
    monkeypatch.setattr(Llama, "section", AttentionArchitecture)
    with pytest.raises(NotSupportedYet, match="head_dim 32, other than hidden_size / num_attention_heads = 16"):
        read(head_dim=32)


@pytest.mark.parametrize("model_type", ["codegen", "rwkv", "pegasus"])
def test_a_config_without_ids_of_special_tokens_has_none(model_type):
    """transformers' classes for these have no pad_token_id, or no bos_token_id."""
    config = AutoConfig.for_model(model_type).to_dict() | {"architectures": None}
    found = architecture_from_hf(config, "config.json")
    assert found.hf_config["model_type"] == model_type
    assert found.vocab_size == config["vocab_size"]


def test_of_several_ends_of_text_the_first_is_taken_and_that_is_said():
    lines = []
    found = architecture_from_hf(SMALL | {"eos_token_id": [7, 8]}, "config.json", lines.append)
    assert found.eos_token_id == 7
    assert "[7, 8]" in lines[0]


def test_a_null_token_that_gets_a_number_is_said():
    lines = []
    found = architecture_from_hf(SMALL | {"bos_token_id": None, "eos_token_id": 5}, "config.json", lines.append)
    assert (found.bos_token_id, found.eos_token_id) == (1, 5)
    assert lines == ["config.json: bos_token_id is null; 1 is used where there is no tokenizer"]


architectures = st.builds(
    lambda heads, width, kv, **rest: {
        "num_attention_heads": heads,
        "hidden_size": heads * width,
        "num_key_value_heads": heads // kv,
        **rest,
    },
    heads=st.sampled_from([2, 4, 8]),
    width=st.sampled_from([8, 16, 64]),
    kv=st.sampled_from([1, 2]),
    vocab_size=st.integers(1, 10**6),
    num_hidden_layers=st.integers(1, 100),
    intermediate_size=st.integers(1, 10**5),
    max_position_embeddings=st.integers(1, 10**6),
    rms_norm_eps=st.sampled_from([1e-6, 1e-5, 0.01]),
    rope_theta=st.floats(1.0, 1e7),
    rope_scaling=st.sampled_from([None, *(v["rope_scaling"] for v in VARIANTS.values() if "rope_scaling" in v)]),
    attention_bias=st.booleans(),
    tie_word_embeddings=st.booleans(),
    initializer_range=st.floats(0.001, 0.9),
    pad_token_id=st.none() | st.integers(0, 5),
    bos_token_id=st.integers(0, 5),
    eos_token_id=st.integers(0, 5),
    use_cache=st.booleans(),
    hidden_act=st.sampled_from(ACTIVATIONS),
)


@given(architectures, st.sampled_from(["float32", "bfloat16"]))
def test_an_architecture_survives_the_way_to_transformers_and_back(values, dtype):
    architecture = LlamaArchitecture.model_validate(values)
    exported = hf_config(architecture, dtype, architecture.eos_token_id)
    written = json.loads(exported.to_json_string(use_diff=False))
    assert architecture_from_hf(written, "config.json") == architecture
    assert written["dtype"] == dtype


def test_a_config_written_by_transformers_is_read_with_our_keys_on_top(tmp_path):
    theirs = hf_llama(**VARIANTS["llama3"])
    theirs.config.save_pretrained(tmp_path)
    found = hf_architecture(tmp_path, {"rope_theta": 7.0, "vocab_size": 512})
    assert (found.rope_theta, found.vocab_size) == (7.0, 512)
    assert found.hidden_size == theirs.config.hidden_size
    assert found.rope_scaling == VARIANTS["llama3"]["rope_scaling"]
