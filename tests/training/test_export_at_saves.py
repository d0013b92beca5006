"""`checkpoints.export_hf`: beside every checkpoint a folder that transformers loads, complete or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron import checkpoint
from kenotron.config.errors import InputError, RunFailed
from kenotron.generation.load import load_for_generation
from support.tiny_llamas import hf_logits, load_hf, our_logits
from support.tiny_run import equal_bits, exported, saved_weights, text_overrides, tiny_config, train_quietly

EXPORT = "checkpoints.export_hf=true"


def test_every_checkpoint_has_its_export_and_goes_with_it(tmp_path: Path) -> None:
    keys = ("checkpoints.checkpoint_interval=1", "checkpoints.keep_last=2", *text_overrides(tmp_path))
    train_quietly(tiny_config(tmp_path, EXPORT, "model.dtype=bfloat16", *keys))
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert steps == ["2", "3"]
    for step in steps:
        path = tmp_path / "checkpoints" / step
        masters = saved_weights(path)
        assert equal_bits_bf16(exported(path / "hf"), masters)
        assert checkpoint.verify(path) == []
    tokens = torch.randint(300, (1, 16), generator=torch.Generator().manual_seed(0))
    ours = our_logits(load_for_generation(path / "hf", "float32").model, tokens)
    assert torch.allclose(hf_logits(load_hf(path / "hf"), tokens), ours, atol=1e-4)
    assert (path / "hf" / "tokenizer.json").read_text() == (path / "tokenizer" / "tokenizer.json").read_text()


def equal_bits_bf16(found: dict[str, torch.Tensor], masters: dict[str, torch.Tensor]) -> bool:
    return found.keys() == masters.keys() and all(torch.equal(found[name], masters[name].bfloat16()) for name in found)


def test_an_export_that_fails_ends_the_run_behind_its_checkpoint_and_the_next_start_makes_up_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    keys = (EXPORT, "checkpoints.checkpoint_interval=2")
    with pytest.raises(
        RunFailed, match=r"step 2: checkpoints\.export_hf: cannot write .*2/hf: No space left on device"
    ):
        train_quietly(tiny_config(tmp_path, *keys))
    second = tmp_path / "checkpoints" / "2"
    assert checkpoint.verify(second) == []
    assert not list(second.glob("hf*"))
    monkeypatch.undo()
    (second / "hf.tmp-0123abcd").mkdir()  # what a killed process left
    train_quietly(tiny_config(tmp_path, *keys))
    assert [path.name for path in second.glob("hf*")] == ["hf"]
    for step in ("2", "3"):
        path = tmp_path / "checkpoints" / step
        assert equal_bits(exported(path / "hf"), saved_weights(path))


def test_what_transformers_has_no_class_for_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"checkpoints\.export_hf: attention_bias: false: Hugging Face's Qwen2 has"):
        train_quietly(tiny_config(tmp_path, EXPORT, "model.model_config.is_qwen2_config=true"))
    assert not list((tmp_path / "checkpoints").glob("*/manifest.json"))
