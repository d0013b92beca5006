"""A model that others wrote computes what they compute: one training step, decoding, what its wrapper could lose."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from kenotron.config import Config, dump, load
from kenotron.config.errors import InputError
from kenotron.config.resolved import read_resolved
from kenotron.config.writing import to_dict
from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import load_for_generation
from kenotron.interop import from_hf, open_source, resolve_architecture, to_hf
from kenotron.kernels.attention import attention
from kenotron.models import Context, named_parameters
from kenotron.parallel.mesh import Mesh
from kenotron.training.model_parts import build_parts
from kenotron.training.step import count_real_tokens, forward_backward
from support.foreign_models import MODELS, folder_of, plain_config, random_model
from support.layout_runs import prepared
from support.tiny_run import equal_bits, losses, saved_weights, tiny_config, train_and_listen, train_quietly

PROMPTS = [[3, 14, 15], [9], [2, 6, 5, 3, 5, 8, 9]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every model in a folder."""
    root = tmp_path_factory.mktemp("models")
    return {which: folder_of(which, root) for which in MODELS}


def config_of(folder: Path, source: Path, *overrides: str, **keys: Any) -> Config:
    """A run from the weights of `source`, resolved."""
    plain = plain_config(folder, {"hf": str(source)} | keys, {"path": str(source)})
    return resolve_architecture(load(plain, overrides))


def one_pass(run: Any) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The loss of the first step, whose gradients stay, its tokens and its labels."""
    (batch,) = run.data.batch(1, 0, 1)
    loss, _ = forward_backward(run, [batch], 1.0 / count_real_tokens(run, [batch]))
    return float(loss), torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels).flatten()


@pytest.mark.cases(8)
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("recompute", ["false", "true", "selective", "elementwise"])
def test_loss_and_gradients_are_those_of_transformers(which, recompute, folders, tmp_path):
    config = config_of(tmp_path, folders[which], f"parallelism.recompute_layer={recompute}")
    theirs = random_model(which)
    with prepared(config, Mesh()) as run:
        run.model.train()  # as after a validation
        assert run.model.training
        loss, tokens, labels = one_pass(run)
        expected = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels)
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        found, wanted = dict(named_parameters(run.model)), dict(theirs.named_parameters())
        assert found.keys() == wanted.keys()
        for name, parameter in found.items():
            difference = (parameter.grad - wanted[name].grad).norm()
            assert difference <= 1e-5 * wanted[name].grad.norm(), name


@pytest.mark.parametrize("which", ["phi3", "gemma3_text"])
def test_buffers_survive_the_meta_device_in_their_own_dtype(which, folders, tmp_path):
    config = config_of(tmp_path, folders[which], "model.dtype=bfloat16")
    (model,), _ = build_parts(config, Mesh(), torch.device("cpu"))
    expected = dict(random_model(which).named_buffers())
    assert expected
    assert equal_bits(dict(model.named_buffers()), expected)
    decoding = load_for_generation(folders[which], "bfloat16").model
    assert equal_bits(dict(decoding.named_buffers()), expected)


def test_bfloat16_computes_as_autocast_does(folders: dict[str, Path], tmp_path: Path) -> None:
    config, theirs = config_of(tmp_path, folders["phi3"], "model.dtype=bfloat16"), random_model("phi3")
    with prepared(config, Mesh()) as run:
        loss, tokens, labels = one_pass(run)
        with torch.autocast("cpu", torch.bfloat16):
            logits = theirs(tokens).logits
        expected = F.cross_entropy(logits.flatten(0, 1).float(), labels)
        assert logits.dtype == torch.bfloat16
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        assert all(parameter.dtype == torch.float32 for parameter in run.model.parameters())


@pytest.mark.cases(2)
@pytest.mark.parametrize("which", MODELS)
def test_a_run_from_random_weights_goes_to_transformers_and_back(which, folders, tmp_path):
    init = {"std": 0.1, "scaling_method": "NONE"}
    plain = plain_config(tmp_path, {"hf": str(folders[which]), "eos_token_id": 7}, init)
    plain["checkpoints"]["export_hf"] = True
    config = load(plain)
    _, printed = train_and_listen(config)
    assert " convert to-hf " in printed.partition(". Next:\n")[2]
    found = losses(config)
    assert len(found) == 3
    assert all(abs(loss - 4.1) < 0.5 for loss in found)  # ln 61
    saved = tmp_path / "checkpoints" / "3"
    ours, theirs = load_for_generation(saved, "float32").model, type(random_model(which))
    model, said = theirs.from_pretrained(saved / "hf", dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    wanted = [model.eval().generate(torch.tensor([prompt]), **greedy)[0].tolist() for prompt in PROMPTS]
    completions = generate(ours, None, PROMPTS, SamplingOptions(max_new_tokens=6, stop_at_eos=False), batch_size=2)
    assert [prompt + one.tokens for prompt, one in zip(PROMPTS, completions)] == wanted
    from_hf(saved / "hf", tmp_path / "back")
    assert equal_bits(saved_weights(tmp_path / "back" / "0"), saved_weights(saved))
    to_hf(saved, tmp_path / "half", dtype="bfloat16")
    written = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (written["dtype"], written["eos_token_id"]) == ("bfloat16", 7)


def test_random_weights_are_the_models_own_and_follow_the_seed(folders: dict[str, Path], tmp_path: Path) -> None:
    def drawn(std: float, seed: int) -> dict[str, torch.Tensor]:
        plain = plain_config(tmp_path, {"hf": str(folders["gpt2"])}, {"std": std, "scaling_method": "NONE"})
        plain["general"]["seed"] = seed
        before = torch.get_rng_state()
        with prepared(resolve_architecture(load(plain)), Mesh()) as run:
            assert torch.equal(torch.get_rng_state(), before)
            return {name: parameter.detach().clone() for name, parameter in named_parameters(run.model)}

    one, again, other, small = drawn(0.1, 1), drawn(0.1, 1), drawn(0.1, 2), drawn(0.01, 1)
    assert equal_bits(one, again)
    matrix = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(one[matrix], other[matrix])
    assert float(one[matrix].std()) == pytest.approx(0.1, rel=0.1)
    assert float(small[matrix].std()) == pytest.approx(0.01, rel=0.1)
    # GPT-2's own rule for what writes into the residual stream: std / sqrt(2 * layers).
    assert float(one["transformer.h.0.attn.c_proj.weight"].std()) == pytest.approx(0.1 / 6**0.5, rel=0.1)


@pytest.mark.parametrize("which", MODELS)
def test_decoding_with_its_cache_is_generate_of_transformers(which: str, folders: dict[str, Path]) -> None:
    # BLOOM takes no positions, so texts of different lengths are computed anew for every token.
    prompts = PROMPTS if which != "bloom" else [each[-1:] for each in PROMPTS]
    model, theirs = load_for_generation(folders[which], "float32").model, random_model(which)
    passes: list[tuple[int, ...]] = []
    model.foreign_module.register_forward_pre_hook(
        lambda _, args, keys: passes.append(tuple(keys["input_ids"].shape)), with_kwargs=True
    )
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    expected = theirs.generate(padded, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None)
    wanted = [tokens[longest:] for tokens in expected.tolist()]
    sampling = SamplingOptions(max_new_tokens=9, stop_at_eos=False, logprobs=True)
    found = generate(model, None, prompts, sampling)
    assert [one.tokens for one in found] == wanted
    assert passes == [(3, longest), *[(3, 1)] * 8]
    for prompt, one in zip(prompts, found):  # in float32, as was asked for: bfloat16 finds the same tokens
        with torch.no_grad():
            after = theirs(torch.tensor([prompt + one.tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        exact = after.gather(1, torch.tensor(one.tokens)[:, None])[:, 0].tolist()
        assert one.logprobs == pytest.approx(exact, abs=1e-5)
    # Texts that end, at a token that some of them have, leave the batch.
    passes.clear()
    model.config = model.config.model_copy(update={"eos_token_id": wanted[0][0]})
    ends = [tokens.index(wanted[0][0]) + 1 if wanted[0][0] in tokens else 9 for tokens in wanted]
    assert min(ends) < max(ends)
    found = generate(model, None, prompts, SamplingOptions(max_new_tokens=9))
    assert [one.tokens for one in found] == [tokens[:end] for tokens, end in zip(wanted, ends)]
    assert passes == [(3, longest), *[(sum(end > step for end in ends), 1) for step in range(1, max(ends))]]


def test_texts_of_a_model_with_short_convolutions_are_computed_anew_for_every_token(tmp_path: Path) -> None:
    """transformers' cache of LFM2 cannot forget the texts that end, and does not say that it is recurrent."""
    keys = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    keys |= {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    model = load_for_generation(folder_of("lfm2", tmp_path, **keys), "float32").model
    free = generate(model, None, PROMPTS, SamplingOptions(max_new_tokens=5, stop_at_eos=False))
    model.config = model.config.model_copy(update={"eos_token_id": free[0].tokens[1]})
    found = generate(model, None, PROMPTS, SamplingOptions(max_new_tokens=5))
    alone = [generate(model, None, [prompt], SamplingOptions(max_new_tokens=5))[0] for prompt in PROMPTS]
    assert found == alone
    assert {len(each.tokens) for each in found} > {len(found[0].tokens)}


def packed(documents: list[list[int]]) -> tuple[torch.Tensor, Context]:
    """Documents end to end in one sequence."""
    lengths = [len(each) for each in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])
    ctx = Context((1, sum(lengths)), positions, attention, cu_seqlens=(0, *torch.tensor(lengths).cumsum(0).tolist()))
    return torch.tensor([token for each in documents for token in each]), ctx


@pytest.mark.parametrize("which", ["gpt2", "gemma3_text"])
def test_packed_documents_do_not_see_each_other(which: str, folders: dict[str, Path]) -> None:
    model = load_for_generation(folders[which], "float32").model
    documents = [[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5], [8, 9, 7, 9, 3]]
    with torch.no_grad():
        found = model(*packed(documents))
        expected = torch.cat([random_model(which)(torch.tensor([each])).logits[0] for each in documents])
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_a_model_that_reads_across_documents_is_refused(folders: dict[str, Path]) -> None:
    model = load_for_generation(folders["bloom"], "float32").model
    with torch.no_grad(), pytest.raises(InputError, match="document_masking: transformers' bloom is not shown to keep"):
        model(*packed([[3, 1, 4, 1], [5, 9, 2, 6]]))


@pytest.mark.parametrize(
    ("keys", "overrides", "message"),
    [
        ({"n_layers": 2}, [], r"^model\.model_config\.n_layers: the config of gpt2 has no such key; did you mean"),
        ({"attn_pdrop": 0.2}, [], r"^model\.model_config\.attn_pdrop: 0\.2 has no effect without training_dropout"),
        ({"training_dropout": True}, ["model.compile=true"], r"^model\.compile: expected false with model\.model_con"),
        ({"n_layer": "two"}, [], r"^\S+config\.json: .*n_layer"),
        ({"blocks": "transformer.hh.*"}, [], r"blocks: transformers' gpt2: 'transformer\.hh\.\*' matches no mod"),
        ({}, ["parallelism.pp=2"], r"^parallelism\.pp: expected 1: transformers' gpt2"),
        ({}, ["parallelism.context_parallel_size=2"], r"^parallelism\.context_parallel_size: expected 1: .* gpt2"),
        ({}, ["parallelism.tp=2"], r"^parallelism\.tp: expected 1: transformers has no tensor-parallel plan for"),
        ({}, ["parallelism.expert_parallel_size=2", "parallelism.dp=2"], r"^parallelism\.expert_parallel_size: "),
        ({}, ["model.make_vocab_size_divisible_by=8"], r"^model\.make_vocab_size_divisible_by: expected 1: nothing"),
        ({}, ["model.init_method={std: 0.1}"], r"^model\.init_method\.scaling_method: expected NONE: tr"),
        ({"n_layer": 2}, [], r"num_hidden_layers: the weights in \S+ have 3, the config says 2"),
        ({"n_inner": 40}, [], r"transformer\.h\.0\.mlp\.c_fc\.weight is \[32, 128\] there, .* says \[32, 40\]"),
        ({"n_embd": 64}, [], r"hidden_size: the weights in \S+ have 32, the config says 64"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(keys, overrides, message, folders, tmp_path):
    def begin() -> None:
        with prepared(config_of(tmp_path, folders["gpt2"], *overrides, **keys), Mesh()):
            pass

    with pytest.raises(InputError, match=message) as error:
        begin()
    assert len(str(error.value).splitlines()) == 1


NARROW = {"transformer.ln_f.bias": torch.ones(3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("transformer.ln_f.bias"), r"has no tensor 'transformer\.ln_f\.bias' \(1 in all\)$"),
        (lambda found: found.update(odd=torch.ones(1)), r"has a tensor that its model lacks: 'odd' \(1 in all\)$"),
        (lambda found: found.update(NARROW), r"transformer\.ln_f\.bias has shape \[3\], and its config says \[32\]"),
        (None, r"/gpt2: Error while deserializing header"),
    ],
    ids=["missing", "extra", "of another shape", "damaged"],
)
def test_files_that_do_not_fit_are_one_line(change, message, folders, tmp_path):
    source = shutil.copytree(folders["gpt2"], tmp_path / "gpt2")
    file = source / "model.safetensors"
    if change is None:
        file.write_bytes(file.read_bytes()[:100])
    else:
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=message) as error:
        from_hf(source, tmp_path / "ours")
    assert len(str(error.value).splitlines()) == 1
    assert str(source) in str(error.value)
    assert not (tmp_path / "ours" / "0").exists()


@pytest.mark.parametrize(
    ("which", "keys", "mode", "message"),
    [
        ("phi3", {}, "ALL_REDUCE", r"^parallelism\.tp: .* splits layers\.\*\.self_attn\.qkv_proj of .* as"),
        (
            "gemma3_text",
            {"training_dropout": True},
            "ALL_REDUCE",
            r"^parallelism\.tp: expected 1: model_config\.training_dropout is for ranks",
        ),
        (
            "gemma3_text",
            {},
            "REDUCE_SCATTER",
            r"^parallelism\.tp_mode: expected ALL_REDUCE: the code of transformers' gemma3_text",
        ),
    ],
)
def test_what_tensor_parallelism_is_not_for_is_refused(which, keys, mode, message, folders, tmp_path):
    with pytest.raises(InputError, match=message):
        config_of(tmp_path, folders[which], "parallelism.tp=2", f"parallelism.tp_mode={mode}", **keys)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.mix(self.norm(x)).cumsum(1).tanh()


class Running(nn.Module):
    """Running sums; a parameter at the root, a buffer, a tied head, dropout."""

    def __init__(self, vocab_size, width=16, layers=2):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.full((width,), 0.5))
        self.embedding = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def init_weights(self, std):
        nn.init.normal_(self.embedding.weight, std=std)

    def forward(self, tokens):
        x = self.dropout(self.embedding(tokens) * self.scale + self.shift)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LastToken(Running):
    def forward(self, tokens):
        return super().forward(tokens)[:, -1]


class Across(nn.Module):
    """The two blocks share a weight."""

    def __init__(self, vocab_size):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.blocks[1].mix.weight = self.blocks[0].mix.weight


def none(vocab_size):
    return None


def of_user(folder: Path, *overrides: str, **keys: Any) -> Config:
    model = {"module": f"{__name__}.Running", "vocab_size": 61, "eos_token_id": 5} | keys
    return load(plain_config(folder, model, {"std": 0.3, "scaling_method": "NONE"}), overrides)


def test_a_module_of_ones_own_trains_as_a_plain_loop_trains_it(tmp_path: Path) -> None:
    config = of_user(tmp_path, "optimizer.weight_decay=0.0", width=12)
    with prepared(config, Mesh()) as run:
        reference = Running(61, 12).eval()
        reference.load_state_dict({name: value.clone() for name, value in run.model._module[0].state_dict().items()})
        assert float(reference.embedding.weight.detach().std()) == pytest.approx(0.3, rel=0.1)
        assert [name for name, _ in named_parameters(run.model)] == [name for name, _ in reference.named_parameters()]
        loss, tokens, labels = one_pass(run)
        expected = F.cross_entropy(reference(tokens).flatten(0, 1), labels)
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        for name, parameter in reference.named_parameters():
            assert torch.allclose(run.model.get_parameter(name).grad, parameter.grad, rtol=1e-5, atol=1e-6), name


def test_its_config_comes_back_and_its_checkpoint_decodes(tmp_path: Path) -> None:
    config = of_user(tmp_path, layers=3)
    assert load(yaml.safe_load(dump(config))) == config
    _, said = train_and_listen(config)
    commands = [line.split()[1] for line in said.partition(". Next:\n")[2].splitlines()]
    assert commands == ["generate", "report"]  # no export
    model = load_for_generation(tmp_path / "checkpoints", "float32").model
    (completion,) = generate(model, None, [[3, 1, 4]], SamplingOptions(max_new_tokens=5, stop_at_eos=False))
    text = [3, 1, 4]
    for token in completion.tokens:
        with torch.no_grad():
            assert token == int(model._module[0](torch.tensor([text]))[0, -1].argmax())
        text.append(token)
    assert set(open_source(tmp_path / "checkpoints").weights) >= {"scale", "embedding.weight", "blocks.2.mix.weight"}
    with pytest.raises(
        InputError, match=rf"^module '{__name__}\.Running' has no counterpart in transformers: it cannot"
    ):
        to_hf(tmp_path / "checkpoints", tmp_path / "exported")


def test_a_checkpoint_says_where_its_code_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "running.py").write_text(f"import {__name__}\nclass Running({__name__}.Running): pass\n")
    monkeypatch.chdir(tmp_path)
    train_quietly(of_user(tmp_path, module="running.Running"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sys.modules.pop("running")
    there = f"running from {tmp_path / 'running.py'}"
    said = rf"model\.model_config: .*cannot import 'running'.*its run imported .*{there}"
    with pytest.raises(InputError, match=said):
        open_source(tmp_path / "checkpoints")


def test_a_checkpoint_says_where_the_code_of_its_family_was(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    config = to_dict(tiny_config(tmp_path))
    config["model"]["model_config"] = {"family": "my_neox.MyNeoX", "hidden_size": 16}
    file.write_text(f"{yaml.safe_dump(config)}# imported my_neox from /code/my_neox.py\n")
    there = "cannot import 'my_neox'.*; its run imported my_neox from /code/my_neox.py"
    with pytest.raises(InputError, match=rf"config.yaml: model.model_config.family: {there}"):
        read_resolved(file)


def test_its_longest_text_ends_a_completion(tmp_path: Path) -> None:
    train_quietly(of_user(tmp_path, "tokens.train_steps=1", max_position_embeddings=6))
    model = load_for_generation(tmp_path / "checkpoints").model
    (completion,) = generate(model, None, [[3, 1, 4]], SamplingOptions(max_new_tokens=5, stop_at_eos=False))
    assert (len(completion.tokens), completion.stopped_by) == (3, "max_position_embeddings")


@pytest.mark.parametrize(
    ("keys", "overrides", "message"),
    [
        ({"witdh": 3}, [], rf"model\.model_config\.witdh: {__name__}\.Running does not take it; did you mean 'width'"),
        ({"module": f"{__name__}.Runing"}, [], rf"model_config\.module: module '{__name__}' has no 'Runing'; did"),
        ({"module": "runing.Running"}, [], r"model_config\.module: cannot import 'runing'"),
        ({"module": f"{__name__}.none"}, [], rf"model_config\.module: expected {__name__}\.none to make an nn\.Module"),
        ({"module": f"{__name__}.Block"}, [], rf"model\.model_config\.width: missing: {__name__}\.Block needs it"),
        ({"module": f"{__name__}.Across"}, [], r"blocks\.0\.mix\.weight and blocks\.1\.mix\.weight are one weight"),
        (
            {"module": f"{__name__}.LastToken"},
            [],
            rf"{__name__}\.LastToken: expected logits of shape \[1, 16, 61\], found \[1, 61\]",
        ),
        ({"vocab_size": None}, [], r"model\.model_config\.vocab_size"),
        (
            {},
            ["parallelism.tp=2"],
            rf"parallelism\.tp: expected 1: {__name__}\.Running has no plan for tensor parallelism",
        ),
        ({}, ["parallelism.pp=2"], rf"parallelism\.pp: expected 1: .*{__name__}\.Running"),
    ],
)  # fmt: skip
def test_mistakes_in_it_are_one_line(keys: dict[str, Any], overrides: list[str], message: str, tmp_path: Path) -> None:
    def begin() -> None:
        with prepared(of_user(tmp_path, *overrides, **keys), Mesh()) as run:
            one_pass(run)

    with pytest.raises(InputError, match=message) as error:
        begin()
    assert len(str(error.value).splitlines()) == 1
