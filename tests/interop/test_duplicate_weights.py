"""Weights that a Hugging Face folder holds twice: they are compared, and none is dropped in silence."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kenotron.config.errors import InputError
from kenotron.interop import tensor_names
from kenotron.interop.sources import initial_tensors
from support.tiny_llamas import hf_llama


@pytest.fixture(autouse=True)
def _several_groups_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_names, "ROWS", 24)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_head_beside_a_tied_config_must_equal_the_embedding(tmp_path: Path, change: float) -> None:
    hf_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    expect_compared(tmp_path, change)


def expect_compared(folder: Path, change: float) -> None:
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
def test_so_must_one_of_a_model_without_a_file_here(tmp_path: Path, change: float) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": None}
    transformers.OlmoForCausalLM(transformers.OlmoConfig(**sizes, **heads)).save_pretrained(tmp_path)
    expect_compared(tmp_path, change)


def test_an_index_beside_a_single_file_is_refused(tmp_path: Path) -> None:
    hf_llama().save_pretrained(tmp_path / "two", max_shard_size="4KB")
    hf_llama().save_pretrained(tmp_path / "one")
    initial_tensors(tmp_path / "two")
    shutil.copy(tmp_path / "one/model.safetensors", tmp_path / "two")
    with pytest.raises(InputError, match=r"both model.safetensors and model.safetensors.index.json"):
        initial_tensors(tmp_path / "two")
