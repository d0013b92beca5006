"""Log-probabilities of a checkpoint in training, in decoding and in transformers: `kenotron compare --hf`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kenotron.evaluation import mismatch
from kenotron.evaluation.mismatch import find_mismatch
from kenotron.generation import decode
from kenotron.interop import to_hf
from support.tiny_llamas import hf_logits
from support.tiny_run import Shell, tiny_config, train_quietly


def trained(folder: Path, *overrides: str) -> Path:
    train_quietly(tiny_config(folder, "tokens.train_steps=2", *overrides))
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("bf16"), "model.dtype=bfloat16", "model.init_method={std: 0.5}")


@pytest.mark.parametrize(
    "overrides", [(), ("model.model_config.family=mixtral", "model.model_config.num_local_experts=4")]
)
def test_in_fp32_all_are_near(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    checkpoint = trained(tmp_path, "model.init_method={std: 0.5}", *overrides)
    found = find_mismatch(checkpoint, texts=4, tokens=500, report=print)
    assert [each.side for each in found.distances] == ["training", "decoding", "transformers in float32"]
    assert [len(text) for text in found.texts] == [31] * 4  # what the model reads at once, less the first
    assert len({tuple(text) for text in found.texts}) == 4
    assert all(each.worst < 2e-5 for each in found.distances)
    assert found.apart == []


def test_distances_are_those_of_the_definition(in_bf16: Path, tmp_path: Path) -> None:
    """Of transformers in bf16 from transformers in fp32, computed here."""
    found = find_mismatch(in_bf16, texts=3, tokens=9, report=print)
    theirs = found.distances[-1]
    logs = []
    for dtype in ("float32", "bfloat16"):
        to_hf(in_bf16, tmp_path / dtype, dtype=dtype)
        ids = torch.tensor([[1, *text] for text in found.texts])
        model = LlamaForCausalLM.from_pretrained(tmp_path / dtype, dtype=getattr(torch, dtype)).eval()
        rows = [hf_logits(model, row[None, :-1])[0].float().log_softmax(-1) for row in ids]
        logs.append(torch.stack([row.gather(-1, one[1:, None])[:, 0] for row, one in zip(rows, ids)]).double())
    sizes = (logs[1] - logs[0]).abs()
    assert theirs.mean == pytest.approx(sizes.mean().item(), rel=1e-4)
    assert theirs.worst == pytest.approx(sizes[theirs.text, theirs.token].item(), rel=1e-4)
    assert theirs.worst == pytest.approx(sizes.max().item(), rel=1e-4)
    assert 0 < theirs.mean < 0.1
    assert found.apart == []
    assert all(0.3 * theirs.mean < ours.mean < 2 * theirs.mean for ours in found.distances[:2])  # both round to bf16


def wrong_export(path: Path, folder: Path, **options: Any) -> None:
    to_hf(path, folder, **options)
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 0.05
    (folder / "config.json").write_text(json.dumps(config))


def wrong_decoding(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Decoding without half of what the first layer's attention finds."""

    def forgetting(model: Any, *arguments: Any, **options: Any) -> Any:
        weight = model.model.layers["0"].self_attn.o_proj.weight
        weight[:, ::2] = 0
        return generate(model, *arguments, **options)

    return forgetting


@pytest.mark.parametrize(
    ("name", "fault", "apart"),
    [("to_hf", wrong_export, "training and decoding"), ("generate", wrong_decoding(decode.generate), "decoding")],
)
def test_the_side_that_is_wrong_is_named(
    in_bf16: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell, name: str, fault: Any, apart: str
) -> None:
    monkeypatch.setattr(mismatch, name, fault)
    code, text, _ = shell("compare", in_bf16, "--hf")
    assert code == 1
    assert f"They DIFFER: {apart} by more than " in text
    assert [line.split()[0] for line in text.splitlines()[2:5]] == ["training", "decoding", "transformers"]


def test_a_checkpoint_is_compared_alone(in_bf16: Path, shell: Shell) -> None:
    code, text, said = shell("compare", in_bf16, "--hf")
    assert code == 0
    first = "Log-probabilities of 248 tokens, drawn by decoding, beside those of transformers in float32:"
    assert text.splitlines()[0] == first
    assert text.splitlines()[-1].startswith("They agree: rounding explains ")
    sides = ["decoding 8 texts", "training's forward pass", "transformers in float32", "transformers in bfloat16"]
    assert said.splitlines() == sides
    code, _, error = shell("compare", in_bf16, "parallelism.tp=2", "--hf")
    assert (code, error) == (2, "error: --hf: expected a checkpoint alone, found 2 arguments\n")
    code, _, error = shell("compare", "my.yaml")
    assert code == 2
    assert error.startswith("error: expected another layout, such as parallelism.tp=2")
