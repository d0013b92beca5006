"""What programs besides transformers 5 read in an export: its JSON is parsed by hand here.

FIXTURES are files as transformers 4.56 wrote them; the keys of transformers 5 are not in them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import CONFIG_MAPPING, AutoTokenizer

import kenotron as kn
from kenotron.checkpoint.text_files import save_text_files
from kenotron.config.decoder import RopeArchitecture
from kenotron.config.model import Model
from kenotron.interop import from_hf, to_hf
from kenotron.interop.exporting import write_configs
from kenotron.interop.hf_code import config_class
from kenotron.interop.hf_config import architecture_from_hf
from kenotron.interop.hf_weights import Weights
from kenotron.interop.older_readers import with_older_keys
from kenotron.interop.sources import Source
from kenotron.interop.whole_config import whole_architecture
from kenotron.models.family import family_of
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.tokenizer import load_tokenizer
from support.families import FAMILIES, SHAPES
from support.foreign_models import plain_config
from support.tiny_llamas import VARIANTS, hf_llama, save_hf, small_tokenizer
from support.tiny_run import tiny_config, train_quietly

DECODER = yaml.safe_load("""{attention_dropout: 0.0, bos_token_id: 1, eos_token_id: 2, hidden_act: silu,
    initializer_range: 0.02, rms_norm_eps: 1.0e-05, rope_scaling: null, tie_word_embeddings: false,
    torch_dtype: bfloat16, use_cache: true}""")
FIXTURES: dict[str, dict[str, Any]] = yaml.safe_load("""
llama:
    {bos_token_id: 128000, eos_token_id: 128001,
    rope_scaling: {factor: 32.0, high_freq_factor: 4.0, low_freq_factor: 1.0,
        original_max_position_embeddings: 8192, rope_type: llama3},
    tie_word_embeddings: true, architectures: [LlamaForCausalLM], attention_bias: false, head_dim: 64,
    hidden_size: 2048, intermediate_size: 8192, max_position_embeddings: 131072, mlp_bias: false, model_type: llama,
    num_attention_heads: 32, num_hidden_layers: 16, num_key_value_heads: 8, pretraining_tp: 1, rope_theta: 500000.0,
    vocab_size: 128256}
qwen2:
    {bos_token_id: 151643, eos_token_id: 151643, rms_norm_eps: 1.0e-06,
    rope_scaling: {factor: 4.0, original_max_position_embeddings: 32768, rope_type: yarn, type: yarn},
    tie_word_embeddings: true, architectures: [Qwen2ForCausalLM], hidden_size: 896, intermediate_size: 4864,
    max_position_embeddings: 131072, max_window_layers: 28, model_type: qwen2, num_attention_heads: 14,
    num_hidden_layers: 24, num_key_value_heads: 2, rope_theta: 1000000.0, sliding_window: null,
    use_sliding_window: false, vocab_size: 151936}
mistral:
    {architectures: [MistralForCausalLM], head_dim: 128, hidden_size: 4096, intermediate_size: 14336,
    max_position_embeddings: 32768, model_type: mistral, num_attention_heads: 32, num_hidden_layers: 32,
    num_key_value_heads: 8, rope_theta: 1000000.0, sliding_window: null, vocab_size: 32768}
gpt_neox:
    {architectures: [GPTNeoXForCausalLM], attention_bias: true, attention_dropout: 0.0, bos_token_id: 0,
    eos_token_id: 0, hidden_act: gelu, hidden_dropout: 0.0, hidden_size: 2048, initializer_range: 0.02,
    intermediate_size: 8192, layer_norm_eps: 1.0e-05, max_position_embeddings: 2048, model_type: gpt_neox,
    num_attention_heads: 8, num_hidden_layers: 16, partial_rotary_factor: 0.25, rope_scaling: null, rope_theta: 40000.0,
    rotary_emb_base: 40000.0, rotary_pct: 0.25, tie_word_embeddings: false, torch_dtype: float16, use_cache: true,
    use_parallel_residual: true, vocab_size: 50304}
mixtral:
    {architectures: [MixtralForCausalLM], head_dim: 128, hidden_size: 4096, intermediate_size: 14336,
    max_position_embeddings: 32768, model_type: mixtral, num_attention_heads: 32, num_experts_per_tok: 2,
    num_hidden_layers: 32, num_key_value_heads: 8, num_local_experts: 8, output_router_logits: false,
    rope_theta: 1000000.0, router_aux_loss_coef: 0.02, router_jitter_noise: 0.0, sliding_window: null,
    vocab_size: 32000}
qwen3_moe:
    {architectures: [Qwen3MoeForCausalLM], attention_bias: false, decoder_sparse_step: 1, head_dim: 128,
    hidden_size: 2048, intermediate_size: 6144, max_position_embeddings: 40960, mlp_only_layers: [],
    model_type: qwen3_moe, moe_intermediate_size: 768, norm_topk_prob: true, num_attention_heads: 32, num_experts: 96,
    num_experts_per_tok: 8, num_hidden_layers: 48, num_key_value_heads: 4, output_router_logits: false,
    rope_theta: 10000000.0, router_aux_loss_coef: 0.001, sliding_window: null, use_sliding_window: false,
    vocab_size: 151936}
deepseek_v3:
    {rope_scaling: {beta_fast: 32.0, beta_slow: 1.0, factor: 40.0, mscale: 1.0, mscale_all_dim: 1.0,
        original_max_position_embeddings: 4096, rope_type: yarn, type: yarn},
    architectures: [DeepseekV3ForCausalLM], attention_bias: false, first_k_dense_replace: 3, hidden_size: 7168,
    intermediate_size: 18432, kv_lora_rank: 512, max_position_embeddings: 163840, model_type: deepseek_v3,
    moe_intermediate_size: 2048, n_group: 8, n_routed_experts: 256, n_shared_experts: 1, norm_topk_prob: true,
    num_attention_heads: 128, num_experts_per_tok: 8, num_hidden_layers: 61, num_key_value_heads: 128,
    q_lora_rank: 1536, qk_nope_head_dim: 128, qk_rope_head_dim: 64, rope_interleave: true, rope_theta: 10000.0,
    routed_scaling_factor: 2.5, topk_group: 4, v_head_dim: 128, vocab_size: 129280}
""")
FIXTURES["qwen2"]["layer_types"] = ["full_attention"] * 24
FIXTURES |= {which: DECODER | keys for which, keys in FIXTURES.items() if which != "gpt_neox"}
SCALINGS = [variant["rope_scaling"] for variant in VARIANTS.values() if "rope_scaling" in variant]


def exported_config(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The config.json of an export of the model that `config` describes."""
    architecture = architecture_from_hf(config, "config.json")
    dtype = config.get("torch_dtype", "float32")
    model = Model.model_validate({"model_config": architecture, "init_method": {"std": 0.1}, "dtype": dtype})
    folder.mkdir()
    write_configs(Source(folder, model, Weights({}, ""), None), folder, dtype)
    return json.loads((folder / "config.json").read_text())


def without_type(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    return scaling and {key: value for key, value in scaling.items() if key != "type"}


@pytest.mark.parametrize("which", FIXTURES)
def test_an_export_has_the_keys_that_transformers_4_wrote(which: str, tmp_path: Path) -> None:
    fixture = FIXTURES[which]
    found = exported_config(fixture, tmp_path / "out")
    expected = dict(fixture)
    assert without_type(found["rope_scaling"]) == without_type(expected.pop("rope_scaling"))
    assert {key: found.get(key, "absent") for key in expected} == expected
    if fixture["rope_scaling"]:  # readers of before rope_type know only this
        assert found["rope_scaling"]["type"] == fixture["rope_scaling"]["rope_type"]


@pytest.mark.cases(8)
@pytest.mark.parametrize("which", FAMILIES)
def test_every_family_spells_its_rotary_positions_in_both_ways(which: str, tmp_path: Path) -> None:
    kind, keys = FAMILIES[which]
    keys = {key: value for key, value in keys.items() if key != "rope_parameters"}
    theta = "rotary_emb_base" if kind == "gpt_neox" else "rope_theta"
    config = SHAPES | keys | {"model_type": kind, theta: 123456.0}
    for number, scaling in enumerate([None, *SCALINGS]):
        found = exported_config(config | {"rope_scaling": scaling}, tmp_path / str(number))
        assert found["torch_dtype"] == found["dtype"] == "float32"
        architecture = architecture_from_hf(found, "config.json")
        if not isinstance(architecture, RopeArchitecture):
            assert "rope_theta" not in found
            break  # a scaling of nothing is refused
        assert (found["rope_theta"], without_type(found["rope_scaling"])) == (123456.0, scaling)
        if kind == "gpt_neox":
            names = ("rotary_emb_base", "rotary_pct", "partial_rotary_factor")
            assert [found[name] for name in names] == [123456.0, 0.25, 0.25]
        # transformers 5 reads the same from both spellings together, and from each
        its_class = config_class(family_of(architecture))
        alone = {key: value for key, value in found.items() if key != "rope_parameters"}
        for each in (found, alone):
            assert without_type(its_class.from_dict(each).rope_parameters) == found["rope_parameters"]


def test_experts_layers_and_time_steps_have_the_names_that_others_know(tmp_path: Path) -> None:
    found = exported_config(SHAPES | FAMILIES["qwen3_moe"][1] | {"model_type": "qwen3_moe"}, tmp_path / "experts")
    assert found["num_experts"] == found["num_local_experts"] == 6
    keys = FAMILIES["nemotron_h"][1]
    found = exported_config(SHAPES | keys | {"model_type": "nemotron_h"}, tmp_path / "hybrid")
    assert (found["hybrid_override_pattern"], found["num_hidden_layers"]) == (keys["hybrid_override_pattern"], 5)
    found = exported_config(SHAPES | FAMILIES["mamba2"][1] | {"model_type": "mamba2"}, tmp_path / "mamba")
    assert "__float__" not in json.dumps(found)


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3_text": (
        {"rope_theta": 20000.0, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {},
    ),
    "stablelm": ({"rope_theta": 20000.0, "partial_rotary_factor": 0.5, "rope_scaling": None}, {}),
    "phi3": (
        {"rope_theta": 20000.0, "rope_scaling": {"type": "longrope", **LONG}},
        {"original_max_position_embeddings": 32, "max_position_embeddings": 64, "pad_token_id": None},
    ),
    "gemma": ({"rope_theta": 20000.0, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_models_of_transformers_code_spell_them_as_their_version_4_did(kind: str) -> None:
    older, keys = FOREIGN[kind]
    shapes = {key: value for key, value in SHAPES.items() if key != "pad_token_id"}
    config = CONFIG_MAPPING[kind].from_dict(shapes | {"head_dim": 8} | keys | json.loads(json.dumps(older)))
    written = json.loads(config.to_json_string())
    assert older.keys().isdisjoint(written)
    found = with_older_keys(written, config)
    scaling = found["rope_scaling"]
    expected = dict(older)
    assert without_type(scaling) == without_type(expected.pop("rope_scaling"))
    assert {key: found[key] for key in expected} == expected
    if kind == "phi3":  # counts its keys
        assert scaling == older["rope_scaling"]
    again = json.loads(type(config).from_dict(json.loads(json.dumps(found))).to_json_string())
    assert {key: _plain(again[key]) for key in written} == {key: _plain(value) for key, value in written.items()}


def _plain(value: Any) -> Any:
    """Without the older name of a kind of scaling."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key != "type"}
    return value


def test_an_override_counts_also_where_the_file_spells_its_key_in_both_ways() -> None:
    config = CONFIG_MAPPING["gemma"](
        **SHAPES, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    )
    found = with_older_keys(json.loads(config.to_json_string()), config)
    overrides = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    rope = whole_architecture(found, "config.json", overrides, print).transformers_config().rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == ("default", 7.0)
    experts = CONFIG_MAPPING["minimax"](**SHAPES, num_local_experts=4)
    found = with_older_keys(json.loads(experts.to_json_string()), experts)
    section = whole_architecture(found, "config.json", {"num_local_experts": 2}, print)
    assert section.transformers_config().num_local_experts == 2


# ---- tokenizer and generation ------------------------------------------------------------------------------------


def test_a_tokenizer_that_transformers_5_wrote_gets_a_class_that_others_know(tmp_path: Path) -> None:
    save_hf(hf_llama(), tmp_path / "hf", small_tokenizer())
    plain = AutoTokenizer.from_pretrained(tmp_path / "hf")
    plain.add_special_tokens({"extra_special_tokens": ["<|a|>", "<|b|>"]})
    plain.save_pretrained(tmp_path / "hf")
    before = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert before["tokenizer_class"].endswith("Backend")
    assert isinstance(before["extra_special_tokens"], list)
    from_hf(tmp_path / "hf", tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "out")
    after = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert after["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in after  # version 4 fails on a list there
    assert after["additional_special_tokens"] == ["<|a|>", "<|b|>"]
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def main<|a|> return<|b|>"
    assert again(text)["input_ids"] == plain(text)["input_ids"]
    assert again.all_special_ids == plain.all_special_ids


def ids(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content = json.loads((folder / name).read_text())
    return {key: content.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def test_config_and_generation_config_name_no_token_that_the_tokenizer_lacks(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 0)
    tokenizer.save(tmp_path / "tokenizer")
    config = tiny_config(
        tmp_path,
        f"tokenizer.tokenizer_name_or_path={tmp_path}/tokenizer",
        "model.model_config.vocab_size=300",
        "model.model_config.pad_token_id=299",
        "checkpoints.export_hf=true",
        "tokens.train_steps=1",
    )
    train_quietly(config)
    out = tmp_path / "checkpoints" / "1" / "hf"
    assert ids(out) == ids(out, "generation_config.json")
    assert ids(out) == {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 299}


INSTRUCT = {"eos_token_id": [0, 5], "bos_token_id": 1, "do_sample": True, "temperature": 0.6}


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model: two ends of text, defaults of sampling, and a named template beside the default one."""
    folder = save_hf(hf_llama(), tmp_path_factory.mktemp("models") / "instruct", small_tokenizer())
    (folder / "generation_config.json").write_text(json.dumps(INSTRUCT))
    (folder / "chat_template.jinja").write_text("default")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    from_hf(folder, folder.with_name("imported"))
    return folder


def expect_instruct(folder: Path, templates: bool = True) -> None:
    assert json.loads((folder / "generation_config.json").read_text()) == INSTRUCT
    assert ids(folder)["eos_token_id"] == [0, 5]
    if templates:
        assert (folder / "chat_template.jinja").read_text() == "default"
        assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == "with tools"


def train(folder: Path, model: Path, start: Path, tokenizer: Path | None) -> Path:
    """Train a step of the architecture of `model` from the weights of `start`; returns the export at its save."""
    plain = plain_config(folder, {"hf": str(model)}, {"path": str(start)})
    named = [] if tokenizer is None else [f"tokenizer.tokenizer_name_or_path={tokenizer}"]
    train_quietly(kn.load(plain, [*named, "checkpoints.export_hf=true", "tokens.train_steps=1"]))
    return folder / "checkpoints" / "1" / "hf"


@pytest.mark.parametrize("start", ["instruct", "imported", "tokens alone"])
def test_a_run_that_starts_from_a_model_keeps_how_it_generates(start: str, instruct: Path, tmp_path: Path) -> None:
    imported = instruct.with_name("imported")
    begins = {
        "instruct": (instruct, instruct),
        "imported": (imported, imported / "0" / "tokenizer"),
        "tokens alone": (imported, None),
    }
    hf = train(tmp_path, instruct, *begins[start])
    expect_instruct(hf, templates=start != "tokens alone")
    to_hf(tmp_path / "checkpoints", tmp_path / "out")
    expect_instruct(tmp_path / "out", templates=start != "tokens alone")


def test_a_run_that_continues_an_import_keeps_how_it_generates(instruct: Path, tmp_path: Path) -> None:
    resumed = f"checkpoints.resume_checkpoint_path={instruct.with_name('imported')}/0"
    plain = plain_config(tmp_path, {"hf": str(instruct)}, {"std": 0.1})
    keys = [resumed, "checkpoints.load_mode=model_only", "checkpoints.export_hf=true", "tokens.train_steps=1"]
    train_quietly(kn.load(plain, keys))
    expect_instruct(tmp_path / "checkpoints" / "1" / "hf", templates=False)


def test_a_run_with_another_tokenizer_does_not_take_over_ids_of_the_first(instruct: Path, tmp_path: Path) -> None:
    train_byte_level_bpe(["another text " * 9], 280).save(tmp_path / "tokenizer")
    hf = train(tmp_path, instruct, instruct, tmp_path / "tokenizer")
    assert ids(hf, "generation_config.json") == {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}


def test_ends_of_text_that_only_config_json_lists_are_kept(tmp_path: Path) -> None:
    folder = save_hf(hf_llama(eos_token_id=[0, 7]), tmp_path / "hf", small_tokenizer())
    (folder / "generation_config.json").unlink()
    hf = train(tmp_path, folder, folder, folder)
    assert ids(hf)["eos_token_id"] == ids(hf, "generation_config.json")["eos_token_id"] == [0, 7]


def test_an_import_without_tokenizer_keeps_its_generation_config(tmp_path: Path) -> None:
    folder = save_hf(hf_llama(), tmp_path / "hf")
    (folder / "generation_config.json").write_text(json.dumps(INSTRUCT))
    from_hf(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "out")
    expect_instruct(tmp_path / "out", templates=False)
    (folder / "generation_config.json").unlink()
    assert not (from_hf(folder, tmp_path / "plain").path / "tokenizer").exists()


def test_a_tokenizer_without_tokenizer_json_keeps_its_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    small_tokenizer().save(folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (folder / "tokenizer.json").unlink()
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(INSTRUCT))
    loaded = load_tokenizer(folder)
    save_text_files(tmp_path / "new", loaded, [])
    again = load_tokenizer(tmp_path / "new")
    assert (again.hash, again.eos_token_id) == (loaded.hash, loaded.eos_token_id)
    assert again.config["chat_template"] == "{{ messages }}"
    assert json.loads((tmp_path / "new" / "generation_config.json").read_text()) == INSTRUCT
