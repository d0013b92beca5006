"""What is wrong with a model that comes in: one clear line from every command that reads it, nothing half-written."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kenotron.config.errors import InputError
from support.tiny_llamas import hf_llama, save_hf, small_tokenizer
from support.tiny_run import tiny_config, train_quietly


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_hf(hf_llama(), tmp_path_factory.mktemp("model") / "hf", small_tokenizer(), shard="30KB")


@pytest.fixture
def folder(model, tmp_path):
    """A model of several shards, to be broken."""
    return shutil.copytree(model, tmp_path / "hf")


def config(**changes):
    def change(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def tensors(change):
    """Apply `change` to the dict of the shard that has the last norm."""

    def rewrite(folder):
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        file = folder / index[NORM]
        found = load_file(file)
        change(found)
        save_file(found, file, metadata={"format": "pt"})

    return rewrite


def text(name, content):
    return lambda folder: (folder / name).write_text(content)


def last_shard(change):
    return lambda folder: change(sorted(folder.glob("*.safetensors"))[-1])


NORM = "model.norm.weight"
PLACE = r"model-\d+-of-\d+\.safetensors"

BROKEN = {
    "unknown family": (config(model_type="gemma9"), r"config\.json: model family 'gemma9'; expected one of .*llama"),
    "missing weight": (
        tensors(lambda found: found.pop(NORM)),
        r"has no tensor 'model\.norm\.weight', which its config",
    ),
    "extra weight": (
        tensors(lambda found: found.update({"model.norm.bias": torch.ones(32)})),
        r"tensor 'model\.norm\.bias', which its config\.json does not describe",
    ),
    "shape mismatch": (
        tensors(lambda found: found.update({NORM: torch.ones(31)})),
        r"model\.norm\.weight (has shape|is) \[31\].* \[32\]",
    ),
    "vocabulary of another model": (config(vocab_size=299), r"has shape \[300, 32\], and its config says \[299, 32\]"),
    "layers of another model": (config(num_hidden_layers=1), r"tensor 'model\.layers\.1\.\S+', which its config"),
    "corrupt shard": (last_shard(lambda file: file.write_bytes(file.read_bytes()[:-9])), rf"{PLACE} is damaged"),
    "missing shard": (last_shard(lambda file: file.unlink()), r"which its model\.safetensors\.index\.json names"),
    "an adapter": (text("adapter_config.json", "{}"), r"has an adapter \(adapter_config\.json\): merge it"),
    "index without places": (text("model.safetensors.index.json", "{}"), r"index\.json: expected a weight_map"),
    "corrupt tokenizer": (text("tokenizer.json", "{}"), r"tokenizer\.json is not a tokenizer\.json"),
}


@pytest.mark.parametrize("command", ["convert from-hf", "generate"])
@pytest.mark.parametrize("broken", BROKEN)
def test_one_line_names_what_is_wrong_and_nothing_is_written(broken, command, folder, tmp_path, shell):
    break_it, message = BROKEN[broken]
    break_it(folder)
    more = [tmp_path / "ours"] if command == "convert from-hf" else ["--prompt", "def", "--max-new-tokens", 2]
    code, out, err = shell(*command.split(), folder, *more)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert re.search(message, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("broken", ["unknown family", "missing weight", "shape mismatch", "corrupt shard"])
def test_a_run_that_starts_from_it_ends_before_its_first_step(broken, folder, tmp_path):
    break_it, message = BROKEN[broken]
    break_it(folder)
    shapes = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")
    keys = [f"model.model_config.{name}={shapes[name]}" for name in names]
    with pytest.raises(InputError, match=message) as error:
        train_quietly(tiny_config(tmp_path / "run", *keys, f"model.init_method={{path: '{folder}'}}"))
    assert len(str(error.value).splitlines()) == 1
    assert not list((tmp_path / "run").glob("checkpoints/*/*"))


def test_a_tokenizer_with_more_tokens_than_the_model_is_named_where_a_token_would_have_no_row(model, tmp_path, shell):
    folder = save_hf(hf_llama(vocab_size=290), tmp_path / "hf", small_tokenizer())
    _, _, err = shell("convert", "from-hf", folder, tmp_path / "ours")
    assert "the tokenizer has 300 tokens, the model only 290" in err
    code, out, err = shell("generate", folder, "--prompt", small_tokenizer().decode([299]))
    assert (code, out) == (2, "")
    assert err == "error: prompt 1: token 299 is outside the model's vocabulary of 290\n"
    keys = ["tokenizer={train: {vocab_size: 300}}", "model.model_config.vocab_size=290"]
    with pytest.raises(InputError, match=r"tokenizer\.train\.vocab_size: expected at most the model's vocab_size 290"):
        tiny_config(tmp_path / "run", *keys)
