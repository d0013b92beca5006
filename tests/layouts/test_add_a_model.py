"""docs/add-a-model.md does what it says: its file, as it is on the page, trains, resumes elsewhere, and is exported."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kenotron as kn
from kenotron.config import dump, load
from kenotron.config.errors import InputError
from kenotron.config.families import built_in_families
from kenotron.generation.load import load_for_generation
from kenotron.interop import from_hf, open_source, to_hf
from support.layout_runs import train_here
from support.ranks import run_ranks
from support.tiny_llamas import hf_logits, our_logits
from support.tiny_run import losses, tiny_dict, train_quietly

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "add-a-model.md").read_text(encoding="utf-8")
CODE, YAML = (re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0] for language in ("python", "yaml"))
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the user stands, with the page's module."""
    folder, before = tmp_path_factory.mktemp("user"), Path.cwd()
    (folder / "my_neox.py").write_text(CODE)
    os.chdir(folder)
    yield folder
    os.chdir(before)
    sys.modules.pop("my_neox", None)


def plain(folder: Path, name: str) -> dict[str, Any]:
    config = tiny_dict(folder / name)
    config["model"] |= yaml.safe_load(YAML)["model"]
    config["tokens"] |= {"train_steps": STEPS, "micro_batch_size": 2, "batch_accumulation_per_replica": 4}
    config["checkpoints"]["checkpoint_interval"] = 2
    config["optimizer"]["learning_rate_scheduler"]["learning_rate"] = 0.001
    return config


def train_on(rank: int, folder: Path, name: str, overrides: list[str]) -> None:
    """One rank; its working folder is the user's meanwhile."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        train_here(load(plain(folder, name), overrides))
    finally:
        os.chdir(before)
        sys.modules.pop("my_neox", None)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """Checkpoint 4 of a run that stopped at step 2 on tp 2 x pp 2 and went on at dp 2 (ZeRO-3) x tp 2."""
    run_ranks(4, train_on, folder, "split", ["parallelism={tp: 2, pp: 2}", "tokens.train_steps=2"])
    then = ["parallelism={dp: 2, tp: 2, tp_mode: REDUCE_SCATTER}", "optimizer.zero_stage=3"]
    run_ranks(4, train_on, folder, "split", [*then, "tokens.micro_batch_size=1"])
    return folder / "split" / "checkpoints" / str(STEPS)


@pytest.mark.slow
def test_losses_on_two_layouts_are_those_of_one_process(folder: Path, trained: Path) -> None:
    alone = load(plain(folder, "alone"))
    train_quietly(alone)
    expected, found = losses(alone), losses(load(plain(folder, "split")))
    assert len(found) == len(expected) == STEPS
    assert found == pytest.approx(expected, abs=2e-5)
    one, other = open_source(folder / "alone" / "checkpoints").weights, open_source(trained).weights
    assert set(one) == set(other)
    for name in one:
        assert torch.allclose(one[name], other[name], atol=2e-4), name


@pytest.mark.slow
def test_the_comparison_on_the_page_agrees(folder: Path) -> None:
    (folder / "my.yaml").write_text(yaml.safe_dump(plain(folder, "compared")))
    assert kn.compare(folder / "my.yaml", ["parallelism.tp=2"], steps=1, dtype="float32").agrees


@pytest.mark.slow
def test_it_goes_to_hugging_face_and_back(folder: Path, trained: Path) -> None:
    from transformers import GPTNeoXForCausalLM

    to_hf(trained, folder / "exported", dtype="float32")
    options = {"dtype": torch.float32, "output_loading_info": True}
    theirs, said = GPTNeoXForCausalLM.from_pretrained(folder / "exported", **options)
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    ours = load_for_generation(trained, "float32").model
    expected = our_logits(ours, tokens)
    assert torch.allclose(hf_logits(theirs.eval(), tokens), expected, atol=1e-4 * expected.abs().max().item())
    from_hf(folder / "exported", folder / "back", family="my_neox.NeoX")
    before, after = open_source(trained).weights, open_source(folder / "back").weights
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_its_config_is_written_back_to_an_equal_one(folder: Path) -> None:
    config = load(plain(folder, "any"))
    again = load(yaml.safe_load(dump(config)))
    assert again == config
    assert type(again.model.architecture) is type(config.model.architecture)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.model_config.layer_norm_epps=1.0", "unknown key 'model.model_config.layer_norm_epps'"),
        ("model.model_config.layer_norm_eps=-1.0", "model.model_config.layer_norm_eps: expected a number above 0"),
        ("model.model_config.num_attention_heads=3", "num_attention_heads: expected a divisor of hidden_size 64"),
        ("model.model_config.family=my_neox.Neo", "module 'my_neox' has no 'Neo'; did you mean 'NeoX'?"),
        ("model.model_config.family=my_neox.MLP", "'my_neox.MLP' is not a model family"),
        ("model.model_config.family=neo", f"({', '.join(built_in_families())}), found 'neo'"),
    ],
)
def test_mistakes_are_named(folder: Path, override: str, expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        load(plain(folder, "any"), [override])


def test_the_file_is_as_short_as_the_page_says() -> None:
    lines = [line for line in CODE.splitlines() if line.strip() and not line.strip().startswith("#")]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(CODE)) if isinstance(node, documented) and ast.get_docstring(node)]
    inside = sum(node.body[0].end_lineno - node.body[0].lineno + 1 for node in nodes)
    assert len(lines) - inside <= 150
