"""`kenotron config` and `kenotron init`."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kenotron.cli import config as command
from kenotron.cli.init import init, starters
from kenotron.config import InputError, dump, load, refuse_unsupported
from kenotron.config.document import parse

PARTS = """
from dataclasses import replace
import torch
from typing import Literal
from kenotron.config.section import key
from kenotron.models.families.llama import Llama, LlamaArchitecture

class NoRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

class Section(LlamaArchitecture):
    family: str = key("The family.", "own_parts.Own")

class Own(Llama):
    section = Section
    plan = replace(Llama.plan, row=("model.layers.*.mlp.down",))

class Uncovered(Llama):
    section = Section

    def init_rules(self, std, scaling):
        return [rule for rule in super().init_rules(std, scaling) if rule.pattern not in ("*norm.weight", "*.weight")]

class NoColumn(Llama):
    section = Section
    plan = replace(Llama.plan, column=tuple(each for each in Llama.plan.column if ".mlp." not in each))
"""

runner = CliRunner()
starter = typer.Typer()
starter.command()(init)


def output(*arguments: object) -> str:
    result = runner.invoke(command.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def path(minimal: dict[str, Any], write: Callable[[str], Path]) -> Path:
    return write(dump(load(minimal)))


def test_check_answers_in_one_line(path: Path) -> None:
    amount = "512 tokens a step, 7.68K in all"
    assert output("check", path) == f"{path}: valid: 15 steps of 2 sequences of 256 tokens, 1 stage; {amount}\n"
    ramp = "data_stages.0.batch_size_ramp={start: 2, increment: 4, samples: 9}"
    said = output("check", path, "tokens.batch_accumulation_per_replica=5", ramp)
    amount = "at most 2.56K tokens a step, at most 38.4K in all"
    assert said == f"{path}: valid: 15 steps of up to 10 sequences of 256 tokens, 1 stage; {amount}\n"
    assert "100 steps" in output("check", path, "tokens.train_steps=100")


def test_stages_of_other_lengths_are_counted_each_with_its_own(path: Path) -> None:
    stages = [
        {"name": f"s{start}", "start_training_step": start, "sequence_length": length, "data": {"dataset": None}}
        for start, length in ((1, None), (6, 512), (11, None), (99, 1024))
    ]
    assert "at most 2.05K tokens a step, 10.2K in all" in output("check", path, f"data_stages={json.dumps(stages)}")


def test_a_larger_global_batch_and_random_tokens_are_said(path: Path) -> None:
    result = runner.invoke(command.app, ["check", str(path), "parallelism.dp=32"])
    assert "parallelism.dp=32: the global batch is now 64 sequences and not 2, 16.4K tokens a step" in result.stderr
    assert "data_stages.0.data.dataset is null: random tokens" in result.stderr
    steps = "tokens.train_steps=9"
    assert "global batch is" in runner.invoke(command.app, ["check", str(path), "parallelism.dp=2", steps]).stderr
    split = "tokens.micro_batch_size=1"
    assert "global batch" not in runner.invoke(command.app, ["check", str(path), "parallelism.dp=2", split]).stderr
    assert f"to keep it, add {split}" in runner.invoke(command.app, ["check", str(path), "parallelism.dp=2"]).stderr


def test_check_refuses_an_optimizer_without_a_rate_and_a_plan_that_names_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"own_parts.NoRate has no 'lr'"):
        output("check", path, "optimizer.optimizer_factory={name: own_parts.NoRate}")
    own = "{family: own_parts.Own, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, vocab_size: 64, "
    own += "num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 64}"
    with pytest.raises(InputError, match=r"plan.row: 'model.layers.\*.mlp.down' matches no module.*mlp.down_proj'"):
        output("check", path, f"model.model_config={own}")
    uncovered, no_column = (f"model.model_config={own.replace('.Own', name)}" for name in (".Uncovered", ".NoColumn"))
    with pytest.raises(InputError, match=r"no rule of the family covers the parameter 'model.embed_tokens.weight'"):
        output("check", path, uncovered)
    output("check", path, no_column)
    for mode in ("ALL_REDUCE", "REDUCE_SCATTER"):
        with pytest.raises(InputError, match=r"plan.row: model.layers.0.mlp.down_proj of own_parts.NoColumn gets all"):
            output("check", path, no_column, "parallelism.tp=2", f"parallelism.tp_mode={mode}")


def test_check_and_submit_say_the_epochs_of_token_files(path: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(10 * 256 + 1, np.uint16))  # 9 sequences and a held-out one; 15 steps read 30
    dataset = f"data_stages.0.data.dataset={{tokens: {tmp_path}/a.npy}}"
    assert output("check", path, dataset).endswith("; after step 15: 3.33 epochs of a.npy\n")
    (tmp_path / "a.txt").write_text("text")
    text = f"data_stages.0.data.dataset={{text_files: {tmp_path}/a.txt}}"
    said = output("check", path, text, "tokenizer.train={vocab_size: 300}", "model.model_config.vocab_size=512")
    assert said.endswith("in all; `kenotron train` says the epochs, once the text is tokenized\n")


def test_show_prints_a_config_that_loads_to_the_same(path: Path) -> None:
    steps = "tokens.train_steps=100"
    assert load(parse(output("show", path, steps)).data) == load(path, [steps])


def test_upgraded_keys_are_reported_on_stderr_not_in_the_output(path: Path) -> None:
    path.write_text(path.read_text().replace("  dp: 1\n", "  dp: 1\n  moe_layer_recompute: false\n", 1))
    result = runner.invoke(command.app, ["show", str(path)])
    assert "moe_layer_recompute is ignored" in result.stderr
    assert "moe_layer_recompute" not in result.stdout


def test_diff_prints_one_line_per_key(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(dump(load(path, ["tokens.train_steps=30", "general.run=x"])))
    assert output("diff", path, other) == "general.run: '%date_%jobid' -> 'x'\ntokens.train_steps: 15 -> 30\n"
    assert output("diff", path, path) == ""


def test_init_lists_the_starters_with_what_they_are_for() -> None:
    listed = runner.invoke(starter, []).stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["hf-finetune", "text-folder", "tiny-llama", "tokens"]
    assert "your own folder of text files" in listed


@pytest.mark.parametrize("name", sorted(starters()))
def test_every_starter_loads_and_is_supported(name: str, tmp_path: Path) -> None:
    written = runner.invoke(starter, [name]).stdout
    path = tmp_path / "my.yaml"
    path.write_text(written)
    refuse_unsupported(load(path, report=pytest.fail))


def test_a_check_imports_no_heavy_library_and_takes_little_processor_time(path: Path) -> None:
    code = (
        "import sys, time; from kenotron.cli.config import app; import kenotron.cli.init\n"
        f"app(['check', {str(path)!r}], standalone_mode=False); print(time.process_time())\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'tokenizers', 'numpy') if m in sys.modules])"
    )

    def is_quick() -> bool:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        *_, seconds, heavy = done.stdout.splitlines()
        assert heavy == "[]"
        return float(seconds) < 0.7

    assert any(is_quick() for _ in range(3))


def test_the_largest_config_loads_within_a_blink(minimal: dict[str, Any]) -> None:
    stage = minimal["data_stages"][0]
    minimal["data_stages"] = [stage | {"name": f"{i}", "start_training_step": i + 1} for i in range(1000)]
    start = time.process_time()
    load(minimal)
    assert time.process_time() - start < 2
