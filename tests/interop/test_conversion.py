"""Folders in, folders out: shards, ties, logits, memory, and clear words for what cannot be converted."""

import json
import resource
import shutil
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kenotron as kn
from kenotron.checkpoint import folders, manifest
from kenotron.config import load
from kenotron.config.architecture import yaml_keys
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.generation.load import load_for_generation
from kenotron.interop import from_hf, initial_tensors, open_source, tensor_names, to_hf
from kenotron.interop.sources import fitted
from kenotron.models import named_parameters
from kenotron.models.families.deepseek_v3 import DeepseekV3Architecture
from kenotron.models.families.llama import LlamaArchitecture
from support.tiny_llamas import (
    VARIANTS,
    hf_llama,
    hf_logits,
    load_hf,
    our_logits,
    our_model,
    random_tokens,
    save_hf,
    save_ours,
    small_tokenizer,
)
from support.tiny_run import environment


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture
def hf_folder(tmp_path, tokenizer):
    return save_hf(hf_llama(), tmp_path / "hf", tokenizer)


@pytest.fixture
def ours(tmp_path, tokenizer):
    """A checkpoint's folder."""
    return save_ours(our_model(tmp_path), tmp_path / "checkpoints", tokenizer)


def test_an_export_is_cut_into_shards_that_transformers_and_we_read_back(ours, tmp_path):
    written = to_hf(ours, tmp_path / "out", dtype="float32", max_shard_size="40KB")
    sizes = [(tmp_path / "out" / name).stat().st_size for name in written.files]
    assert len(sizes) > 3
    assert all(size < 42_000 for size in sizes)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.bytes
    original = open_source(ours).weights
    again = initial_tensors(tmp_path / "out")
    assert all(torch.equal(original[name], again[name]) for name in original)
    tokens = random_tokens(1, 8)
    model = load_for_generation(ours, dtype="float32").model
    assert torch.allclose(hf_logits(load_hf(tmp_path / "out"), tokens), our_logits(model, tokens), atol=1e-4)


def test_an_import_exported_again_is_the_same_model_bit_for_bit(hf_folder, tmp_path):
    from_hf(hf_folder, tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "again")
    before, after = (load_file(f / "model.safetensors") for f in (hf_folder, tmp_path / "again"))
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    older = {"rope_theta": 500.0, "rope_scaling": None, "torch_dtype": "float32"}
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        expected = json.loads((hf_folder / name).read_text()) | (older if name == "config.json" else {})
        assert json.loads((tmp_path / "again" / name).read_text()) == expected


def test_bf16_weights_stay_bf16_on_both_ways(tmp_path):
    folder = save_hf(hf_llama().bfloat16(), tmp_path / "hf")
    from_hf(folder, tmp_path / "ours")
    assert load(tmp_path / "ours" / "0" / "config.yaml").model.dtype == "bfloat16"
    assert {tensor.dtype for tensor in initial_tensors(tmp_path / "ours").values()} == {torch.bfloat16}
    assert to_hf(tmp_path / "ours", tmp_path / "out").dtype == "bfloat16"


def test_fp32_masters_of_a_bf16_run_are_exported_in_bf16_unless_asked_otherwise(tmp_path):
    path = save_ours(our_model(tmp_path), tmp_path / "checkpoints", dtype="bfloat16")
    for dtype, expected in ((None, torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)):
        folder = tmp_path / str(dtype)
        to_hf(path, folder, dtype=dtype)
        weights = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {expected}
        assert json.loads((folder / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
        source = open_source(path).weights["model.norm.weight"]
        assert torch.equal(weights["model.norm.weight"], source.to(expected))


def test_a_tied_head_is_stored_once_and_a_second_copy_in_a_file_does_no_harm(tmp_path):
    theirs = hf_llama(tie_word_embeddings=True)
    folder = save_hf(theirs, tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # in files of old versions
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    from_hf(folder, tmp_path / "ours")
    assert "lm_head.weight" not in initial_tensors(tmp_path / "ours")
    tokens = random_tokens(1, 8)
    model = load_for_generation(tmp_path / "ours").model
    assert torch.allclose(our_logits(model, tokens), hf_logits(theirs, tokens), atol=1e-4)


def test_an_import_is_a_whole_checkpoint_with_a_config_that_loads(hf_folder, tmp_path):
    saved = from_hf(hf_folder, tmp_path / "ours")
    assert saved.path == tmp_path / "ours" / "0"
    assert folders.verify(saved.path) == []
    config = load(saved.path / "config.yaml")
    assert config.model.architecture.hidden_size == 32
    nothing_yet = {"step": 0, "consumed_tokens": 0, "consumed_train_samples": 0}
    assert manifest.read_manifest(saved.path).state == nothing_yet | {"imported_from": str(hf_folder)}


# `init_method: {path}` in a model that may differ in how it keeps the same weights.


@pytest.mark.parametrize("interleaved", [False, True])
def test_initial_tensors_are_turned_into_the_wanted_order_of_channels(interleaved, tmp_path):
    ours = our_model(tmp_path, rope_interleaved=interleaved, attention_bias=True)
    path = save_ours(ours, tmp_path / "checkpoints", rope_interleaved=interleaved, attention_bias=True)
    wanted = open_source(path).architecture.model_copy(update={"rope_interleaved": not interleaved})
    other = our_model(tmp_path, rope_interleaved=not interleaved, attention_bias=True)
    given = initial_tensors(path, wanted)
    with torch.no_grad():
        for name, parameter in named_parameters(other):
            parameter.copy_(given[name])
    tokens = random_tokens(1, 20)
    assert torch.allclose(our_logits(other, tokens), our_logits(ours, tokens), atol=1e-4)


def test_initial_tensors_of_a_tied_model_give_an_untied_one_its_head(tmp_path):
    path = save_ours(our_model(tmp_path, tie_word_embeddings=True), tmp_path / "c", tie_word_embeddings=True)
    wanted = open_source(path).architecture.model_copy(update={"tie_word_embeddings": False})
    given = initial_tensors(path, wanted)
    assert torch.equal(given["lm_head.weight"], given["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings: true, but the weights in .* have a separate output head"),
        ({"intermediate_size": 64}, "intermediate_size: the weights in .* have 48, the config says 64"),
    ],
)
def test_initial_tensors_of_another_model_are_refused_by_the_key_that_differs(ours, other, said):
    with pytest.raises(InputError, match=said):
        initial_tensors(ours, open_source(ours).architecture.model_copy(update=other))


def test_weights_of_deepseek_with_another_order_of_channels_are_refused():
    """Their shapes are equal, so that nothing else would show it."""
    have, wanted = (DeepseekV3Architecture(rope_interleave=value, vocab_size=64) for value in (True, False))
    source = Mock(architecture=have, path="there")
    with pytest.raises(InputError, match=r"rope_interleave: the weights in there have True, the config says False"):
        fitted(source, wanted)


def test_weights_as_pickles_are_refused(hf_folder, tmp_path):
    (hf_folder / "model.safetensors").rename(hf_folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="only safetensors are read"):
        from_hf(hf_folder, tmp_path / "ours")


def test_weights_that_are_no_causal_language_model_are_refused(hf_folder, tmp_path):
    weights = load_file(hf_folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    save_file(bare, hf_folder / "model.safetensors")
    with pytest.raises(NotSupportedYet, match="something other than LlamaForCausalLM"):
        from_hf(hf_folder, tmp_path / "ours")


def test_a_full_folder_is_never_written_into(ours, hf_folder):
    with pytest.raises(InputError, match="is not an empty folder; name a new one"):
        to_hf(ours, hf_folder)
    with pytest.raises(InputError, match="holds checkpoints already"):
        from_hf(hf_folder, ours.parent)


def test_a_damaged_checkpoint_is_not_exported_and_nothing_is_left(ours, tmp_path):
    file = next((ours / "model").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match=f"{file.name} is damaged"):
        to_hf(ours, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_disk_that_is_full_within_the_weights_is_a_line(ours, tmp_path):
    """What safetensors raises then is no OSError."""
    size = max(path.stat().st_size for path in (ours / "model").iterdir())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(InputError, match=r"cannot write .*out: .*File too large"):
            to_hf(ours, tmp_path / "out", dtype="float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("size", ["five", "-3GB", "3XB"])
def test_a_shard_size_that_is_none_is_refused(size, ours, tmp_path):
    with pytest.raises(InputError, match="max_shard_size: expected a size such as 5GB"):
        to_hf(ours, tmp_path / "out", max_shard_size=size)


def test_a_shard_size_is_the_same_in_every_unit(ours, tmp_path):
    for size in ("40KB", "0.04MB", "0.00004GB", "40000", 40000):
        to_hf(ours, tmp_path / "sizes" / f"{size!r}", max_shard_size=size)
    found = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in (tmp_path / "sizes").iterdir()]
    assert len(found) == 5
    assert all(names == found[0] for names in found)
    assert len(found[0]) > 1


# Hub names: the local cache first; offline means offline.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


@pytest.fixture
def repository(cache, hf_folder):
    root = cache / "models--someone--tiny-llama"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("a" * 40)
    shutil.copytree(hf_folder, root / "snapshots" / ("a" * 40))
    return "someone/tiny-llama"


def test_a_cached_repository_is_imported_offline(repository, hf_folder, tmp_path):
    from_hf(repository, tmp_path / "ours")
    found, expected = initial_tensors(tmp_path / "ours"), initial_tensors(hf_folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert load_for_generation(tmp_path / "ours").tokenizer is not None


def test_generation_reads_a_cached_repository_by_its_name(repository, hf_folder):
    expected = kn.generate(hf_folder, "def main", max_new_tokens=5)
    assert kn.generate(repository, "def main", max_new_tokens=5) == expected
    with pytest.raises(InputError, match=r"'someone/else' is not in the local .* HF_HUB_OFFLINE=1 forbids"):
        kn.generate("someone/else", "def main")


def test_a_repository_without_safetensors_is_named(repository, cache, tmp_path):
    next(cache.rglob("model.safetensors")).unlink()
    with pytest.raises(InputError, match=r"'someone/tiny-llama' has no model\.safetensors"):
        from_hf(repository, tmp_path / "ours")


def test_an_architecture_of_ours_has_no_field_that_transformers_would_miss(ours, tmp_path):
    """Every key is either carried over, said to be ours alone, or computed: a new one must be decided on."""
    to_hf(ours, tmp_path / "out")
    carried = set(json.loads((tmp_path / "out" / "config.json").read_text())) | {"rope_theta", "rope_scaling"}
    training_only = {"family", "is_llama_config", "_attn_implementation", "z_loss_enabled", "z_loss_coefficient"}
    baked_into_weights = {"rope_interleaved"}
    assert yaml_keys(LlamaArchitecture) - training_only - baked_into_weights <= carried


# Both directions, every variant: our logits and transformers' agree to 1e-4 of the logit scale, in fp32.

LENGTH = 40  # beyond the `dynamic` variant's max_position_embeddings and every variant's original context


def assert_close(found, expected):
    assert expected.std() > 0.1, "logits too flat to tell anything"
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hugging_face_model_imported_gives_its_logits(variant, tmp_path):
    theirs = hf_llama(**VARIANTS[variant])
    save_hf(theirs, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "checkpoints")
    model, tokenizer, config = load_for_generation(tmp_path / "checkpoints", dtype="float32")
    tokens = random_tokens(2, LENGTH)
    assert tokenizer is None
    assert config.architecture.tie_word_embeddings == (variant == "tied")
    assert_close(our_logits(model, tokens), hf_logits(theirs, tokens))


@pytest.mark.cases(6)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_exported_gives_its_logits_in_transformers(variant, interleaved, tmp_path):
    changes = VARIANTS[variant] | {"rope_interleaved": interleaved}
    ours = our_model(tmp_path, **changes)
    save_ours(ours, tmp_path / "checkpoints", **changes)
    to_hf(tmp_path / "checkpoints" / "10", tmp_path / "hf", dtype="float32")
    tokens = random_tokens(2, LENGTH)
    assert_close(hf_logits(load_hf(tmp_path / "hf"), tokens), our_logits(ours, tokens))


# Weights that a folder holds twice are compared, and none is dropped in silence.


@pytest.fixture
def several_groups_of_rows(monkeypatch):
    monkeypatch.setattr(tensor_names, "ROWS", 24)


@pytest.mark.parametrize("change", [0.0, 1.0])
@pytest.mark.usefixtures("several_groups_of_rows")
def test_a_head_beside_a_tied_config_must_equal_the_embedding(tmp_path, change):
    hf_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    expect_compared(tmp_path, change)


def expect_compared(folder, change):
    """A head that is the embedding with `change` added to its last number: refused, unless that is 0."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    head = embedding.clone()
    head[-1, -1] += change
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    if not change:
        assert torch.equal(initial_tensors(folder)["model.embed_tokens.weight"], embedding)
        return
    with pytest.raises(InputError, match=r"tie_word_embeddings.*'lm_head.weight' differs from 'model.embed_tokens.w"):
        dict(initial_tensors(folder))


@pytest.mark.parametrize("change", [0.0, 1.0])
@pytest.mark.usefixtures("several_groups_of_rows")
def test_so_must_one_of_a_model_without_a_file_here(tmp_path, change):
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": None}
    transformers.OlmoForCausalLM(transformers.OlmoConfig(**sizes, **heads)).save_pretrained(tmp_path)
    expect_compared(tmp_path, change)


def test_an_index_beside_a_single_file_is_refused(tmp_path):
    hf_llama().save_pretrained(tmp_path / "two", max_shard_size="4KB")
    hf_llama().save_pretrained(tmp_path / "one")
    initial_tensors(tmp_path / "two")
    shutil.copy(tmp_path / "one/model.safetensors", tmp_path / "two")
    with pytest.raises(InputError, match=r"both model.safetensors and model.safetensors.index.json"):
        initial_tensors(tmp_path / "two")


# Converting a model takes the memory of two of its shards, whatever its size.

SHARD = 16 << 20
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24, "vocab_size": 8192}

# The process's own memory at its highest within each conversion, less that before it: mapped files are not its own.
MEASURE = """
import json, re, sys, threading
from pathlib import Path
from kenotron.interop import from_hf, to_hf

def peak(convert):
    seen, over = [own()], threading.Event()
    def look():
        while not over.wait(0.001):
            seen.append(own())
    thread = threading.Thread(target=look)
    thread.start()
    convert()
    over.set()
    thread.join()
    return max(seen) - seen[0]

def own():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

small, large, shard = sys.argv[1:]
from_hf(small, "warm")
to_hf("warm/0", "warm-again")
grown = [peak(lambda: from_hf(large, "ours")), peak(lambda: to_hf("ours/0", "again", max_shard_size=int(shard)))]
print(json.dumps(grown))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_both_ways_take_no_more_than_two_shards(tmp_path):
    hf_llama().save_pretrained(tmp_path / "small")
    hf_llama(**SHAPE).save_pretrained(tmp_path / "large", max_shard_size=SHARD)
    shards = list((tmp_path / "large").glob("*.safetensors"))
    assert len(shards) > 6
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), str(SHARD)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for grown in json.loads(done.stdout.splitlines()[-1]):
        assert grown < 2 * max(path.stat().st_size for path in shards)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 6
