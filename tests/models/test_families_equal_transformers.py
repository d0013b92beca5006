"""Every built-in family computes what transformers computes: logits, loss, gradients, decoding.

Mistral's sliding window, Qwen2's attention_bias, Qwen3's norms of queries and keys, OLMo 2's norms behind each
branch, SmolLM3's layers without positions, StarCoder2's LayerNorms (norm_epsilon) and biases (use_bias), GPT-NeoX's
branches side by side, partly rotated heads, hidden_act and layer_norm_eps, nano's hidden_act, norms, value_embeddings
and final_logit_softcapping, Mamba's states
in attention's place are what tells them from a Llama.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from kenotron.config import load
from kenotron.config.architecture import built_in_sections
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import load_for_generation
from kenotron.interop import from_hf, initial_tensors, to_hf
from kenotron.interop.hf_config import architecture_from_hf, hf_config
from kenotron.kernels.attention import Borders, attention
from kenotron.models import Context, named_parameters
from kenotron.models.decoder import Decoder
from kenotron.models.families.gpt_neox import GPTNeoXArchitecture
from kenotron.models.families.qwen2 import Qwen2Architecture
from kenotron.models.families.smollm3 import SmolLM3Architecture
from support.families import FAMILIES, filled, hf_model, in_our_names_of, ours_of, save
from support.plain_attention import numbers_of, plain_attention
from support.tiny_llamas import VARIANTS, our_config, our_logits, random_tokens


def close(found: torch.Tensor, expected: torch.Tensor, least: float = 1e-6) -> None:
    scale = expected.abs().max().clamp_min(least)
    assert ((found - expected).abs().max() / scale).item() < 1e-4


def test_every_built_in_family_is_compared() -> None:
    theirs = {kind.removeprefix("kenotron_") for kind, _ in FAMILIES.values()}
    assert theirs == set(built_in_sections()) - {"llamoe"}  # nanotron's alone


@pytest.mark.parametrize("which", FAMILIES)
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_logits_loss_and_every_gradient_are_those_of_transformers(
    which: str, as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kenotron.models.blocks.linear.adds_inside", lambda x: as_on_a_gpu and x.requires_grad)
    theirs = hf_model(which)
    ours = ours_of(theirs)
    tokens = random_tokens(2, 17)
    close(our_logits(ours, tokens), theirs(tokens).logits.detach())
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    ctx = Context((2, 17), torch.arange(17).repeat(2), attention, loss_scale=1 / 32)
    loss, _ = ours(tokens.flatten(), ctx, labels.flatten())
    loss.backward()
    close(loss.detach(), expected.detach())
    gradients = in_our_names_of(ours, {name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in named_parameters(ours):  # at least: keys' biases without positions have gradient 0
        if parameter.requires_grad:
            close(parameter.grad, gradients[name], least=1e-3)


@pytest.mark.cases(14)
@pytest.mark.parametrize("which", FAMILIES)
def test_greedy_decoding_continues_as_transformers_does(which: str, tmp_path: Path) -> None:
    theirs = hf_model(which)
    model = load_for_generation(save(theirs, tmp_path / "hf")).model
    prompts = [random_tokens(1, length, seed=length)[0] for length in (1, 9, 33)]
    found = generate(model, None, [p.tolist() for p in prompts], SamplingOptions(max_new_tokens=10, stop_at_eos=False))
    for prompt, completion in zip(prompts, found):
        text = theirs.generate(prompt[None], max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert completion.tokens == text[0, len(prompt) :].tolist()


@pytest.mark.cases(9)
@pytest.mark.parametrize("which", FAMILIES)
def test_an_import_exported_again_is_the_same_model(which: str, tmp_path: Path) -> None:
    theirs = hf_model(which)
    folder = save(theirs, tmp_path / "hf")
    from_hf(folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "again")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    tokens = random_tokens(1, 17)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32, trust_remote_code=True)
    assert type(again).__name__ == type(theirs).__name__
    close(again(tokens).logits.detach(), theirs(tokens).logits.detach())


def test_an_export_in_bf16_and_in_several_files_keeps_the_biases_of_experts(tmp_path: Path) -> None:
    from_hf(save(hf_model("deepseek_v3"), tmp_path / "hf"), tmp_path / "ours")
    exported = to_hf(tmp_path / "ours", tmp_path / "again", dtype="bfloat16", max_shard_size="20KB")
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = {name: each for file in exported.files for name, each in load_file(tmp_path / "again" / file).items()}
    assert len(exported.files) > 2
    assert exported.bytes == sum(tensor.nbytes for tensor in after.values())
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        expected = before[name] if name.endswith("e_score_correction_bias") else before[name].bfloat16()
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(again.named_buffers())[name], before[name])
    decoded = load_for_generation(tmp_path / "ours", "bfloat16").model
    assert isinstance(decoded, Decoder)
    assert torch.equal(decoded.get_parameter(name), before[name])  # in fp32, as transformers and training have it
    assert decoded.get_parameter("model.layers.1.mlp.gate.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("which", ["qwen3", "olmo2", "gpt_neox_in_sequence"])
def test_norms_and_channels_without_rope_follow_the_order_of_ropes_channels(which: str, tmp_path: Path) -> None:
    theirs = hf_model(which)
    folder, tokens = save(theirs, tmp_path / "hf"), random_tokens(1, 17)
    halves = load_for_generation(folder).config.architecture
    turned = halves.model_copy(update={"rope_interleaved": True})
    model = filled(Decoder(turned), initial_tensors(str(folder), turned))
    close(our_logits(model, tokens), theirs(tokens).logits.detach())


def test_a_head_dim_of_its_own_is_known_by_name_where_it_is_wrong(tmp_path: Path) -> None:
    keys = {"is_qwen3_config": True, "hidden_size": 30, "num_attention_heads": 4}
    assert load(our_config(tmp_path, **keys, head_dim=6)).model.decoder.head_dim == 6
    with pytest.raises(InputError, match=r"model_config.head_dim: expected an even number, found 5"):
        load(our_config(tmp_path, **keys, head_dim=5))
    with pytest.raises(InputError, match=r"num_attention_heads: expected a divisor of hidden_size 30, found 4"):
        load(our_config(tmp_path, **keys))


def test_layers_without_rope_are_those_of_transformers_and_of_nanotron(tmp_path: Path) -> None:
    for interval in (1, 2, 3, 4, 12):
        theirs = AutoConfig.for_model("smollm3", num_hidden_layers=12, no_rope_layer_interval=interval).no_rope_layers
        keys = {"num_hidden_layers": 12, "hidden_size": 32, "num_attention_heads": 4}
        one = SmolLM3Architecture(**keys, no_rope_layer_interval=interval)
        other = Qwen2Architecture(**keys, no_rope_layer=interval)
        found = [[model.uses_rope(n) for n in range(12)] for model in (one, other)]
        assert found == [list(map(bool, theirs))] * 2
    nanotrons = load(our_config(tmp_path, is_qwen2_config=True, no_rope_layer=2)).model.decoder
    smollm3, tokens = hf_model("smollm3"), random_tokens(2, 17)
    close(our_logits(filled(Decoder(nanotrons), smollm3.state_dict()), tokens), smollm3(tokens).logits.detach())
    with pytest.raises(InputError, match="no_rope_layer: 2: Hugging Face's Qwen2 has rotary positions in every layer"):
        hf_config(nanotrons, "float32", 0)


def test_layers_without_rope_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no_rope_layer: expected a divisor of num_hidden_layers 2, found 3"):
        load(our_config(tmp_path, is_qwen2_config=True, no_rope_layer=3))
    with pytest.raises(InputError, match=r"no_rope_layers: expected a number for each of num_hidden_layers 2, found 1"):
        load(our_config(tmp_path, is_smollm3_config=True, no_rope_layers=[1]))


@pytest.mark.parametrize("which", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"])
def test_a_model_with_windows_that_its_family_has_not_here_is_refused(which: str) -> None:
    theirs = hf_model(which)
    windowed = theirs.config.to_dict() | {"use_sliding_window": True, "architectures": [type(theirs).__name__]}
    with pytest.raises(NotSupportedYet, match="use_sliding_window: true"):
        architecture_from_hf(windowed, "config.json")


OLD_NEOX = yaml.safe_load("""{model_type: gpt_neox, architectures: [GPTNeoXForCausalLM], hidden_size: 64,
    intermediate_size: 128, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 100, rotary_pct: 0.5,
    rotary_emb_base: 5000, hidden_dropout: 0.1}""")


def test_a_gpt_neox_of_transformers_4_is_read() -> None:
    lines: list[str] = []
    found = architecture_from_hf(OLD_NEOX, "config.json", lines.append)
    assert isinstance(found, GPTNeoXArchitecture)
    assert (found.rotary_dim, found.rope_theta, found.use_parallel_residual) == (8, 5000.0, True)
    (line,) = lines
    ignored = "config.json: hidden_dropout 0.1 is ignored: families of ours have no dropout; model_config: {"
    assert line.startswith(ignored)
    rope = hf_config(found, "float32", 0).rope_parameters
    assert (rope["partial_rotary_factor"], rope["rope_theta"]) == (0.5, 5000.0)
    assert architecture_from_hf({**OLD_NEOX, "rotary_pct": 0.25}, "config.json").rotary_factor == 0.25
    with pytest.raises(InputError, match=r"rotary_pct: expected an even number of a head's channels, found 0.2 of 16"):
        architecture_from_hf({**OLD_NEOX, "rotary_pct": 0.2}, "config.json")
    with pytest.raises(InputError, match=r"head_dim: 8: Hugging Face's GPT-NeoX has .* = 16"):
        hf_config(architecture_from_hf({**OLD_NEOX, "head_dim": 8}, "config.json"), "float32", 0)


def test_masks_that_old_versions_saved_are_no_weights() -> None:
    theirs = hf_model("gpt_neox")
    mask = {"gpt_neox.layers.0.attention.bias": torch.ones(1), "gpt_neox.layers.1.attention.masked_bias": torch.ones(1)}
    model = ours_of(theirs)
    names = {name for name, _ in named_parameters(model)}
    assert set(in_our_names_of(model, theirs.state_dict() | mask)) == names
    with pytest.raises(NotSupportedYet, match=r"tensor 'gpt_neox.layers.0.attention.sinks'"):
        in_our_names_of(model, theirs.state_dict() | {"gpt_neox.layers.0.attention.sinks": torch.ones(1)})


def test_a_window_in_blocks_is_the_masked_softmax_in_float64() -> None:
    length, window = 700, 300  # three blocks of queries
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    upstream = torch.randn(q.shape, generator=generator, dtype=torch.float64)
    borders = (0, 650, 700, 700 + 20, 1400)
    for cu_seqlens in (None, borders):
        found = attention(q, k, v, Borders(cu_seqlens), window=window)
        expected = plain_attention(q, k, v, None, numbers_of(cu_seqlens, 2), window)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
        pairs = (torch.autograd.grad((y * upstream).sum(), (q, k, v)) for y in (found, expected))
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*pairs))


def test_a_sliding_window_is_refused_by_what_sends_keys_around(tmp_path: Path) -> None:
    config = our_config(tmp_path) | {"parallelism": {"dp": 1, "pp": 1, "tp": 1, "context_parallel_size": 2}}
    config["model"]["model_config"] |= {"is_mistral_config": True, "sliding_window": 8}
    with pytest.raises(InputError, match=r"a sliding window of 8 tokens needs context_parallel_method ulysses"):
        load(config)
    config["parallelism"]["context_parallel_method"] = "ulysses"
    assert load(config).model.decoder.attention_window == 8
    config["model"]["model_config"]["sliding_window"] = None
    assert load(config).model.decoder.attention_window is None


# ---- any shape: few heads or many, windows, scalings, experts ----

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
def test_any_shape_has_the_logits_of_transformers(
    model: tuple[str, dict[str, Any]], sequences: int, length: int
) -> None:
    which, shapes = model
    theirs = hf_model(which, **shapes)
    tokens = random_tokens(sequences, length) % shapes["vocab_size"]
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = our_logits(ours_of(theirs), tokens)
    assert float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6)) < 1e-4
