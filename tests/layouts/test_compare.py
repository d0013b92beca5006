"""`kenotron compare`: layouts that mean the same agree, one that forgets a sum is found and named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from kenotron.cli.compare import on_layout
from kenotron.config import load
from kenotron.data import TokenBatch
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.training.compare import Comparison, compare, record, references, reordered
from support.layout_runs import Problem
from support.nursery import Nursery
from support.ranks import run_ranks
from support.tiny_run import tiny_yaml

PROBLEM = Problem("compare", steps=4, model={"num_hidden_layers": 2})


def record_on(rank: int, layout: str, order: int, overrides: tuple[str, ...], folder: Path) -> None:
    config = replace(PROBLEM, overrides=overrides).config(layout, folder)
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    record(config, mesh, torch.device("cpu"), steps=4, order=order, folder=str(folder))


def run_all(layout: str, world_size: int, folder: Path, dtype: str = "float32") -> Comparison:
    as_it_is = (f"model.dtype={dtype}",)
    config = replace(PROBLEM, overrides=as_it_is).config("", folder)
    run_ranks(1, record_on, "", 0, as_it_is, folder / "a")
    rounding = []
    for number, each in enumerate(references(config)):
        run_ranks(1, record_on, "", each.order, (*as_it_is, *each.overrides), folder / str(number))
        rounding.append((folder / str(number), each.safety))
    run_ranks(world_size, record_on, layout, 0, as_it_is, folder / "b")
    return compare(folder / "a", rounding, folder / "b", config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=2", "tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b accum=4"])
def test_layouts_of_one_config_agree(layout: str, dtype: str, tmp_path: Path) -> None:
    comparison = run_all(layout, 2, tmp_path, dtype)
    assert comparison.agrees
    assert comparison.first_parameter() is None
    assert [(n.name, n.step) for n in comparison.numbers[:4]] == [
        ("lm_loss", 1),
        ("grad_norm", 1),
        ("lm_loss", 2),
        ("grad_norm", 2),
    ]
    assert len(comparison.gradients) == len(comparison.weights) == 2 * 9 + 3


def test_what_rounding_explains_is_small(tmp_path: Path) -> None:
    comparison = run_all("tp=2", 2, tmp_path)
    assert max(number.allowed / abs(number.a) for number in comparison.numbers) < 1e-4
    assert max(tensor.allowed for tensor in (*comparison.gradients, *comparison.weights)) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layout_that_forgets_a_sum_is_found_at_its_first_parameter(dtype: str, tmp_path: Path) -> None:
    comparison = run_all("dp=2 parallelism.strategy=support.user_parts.forgets_to_sum", 2, tmp_path, dtype)
    assert not comparison.agrees
    first = comparison.first_parameter()
    assert first is not None
    assert first.name == "model.embed_tokens.weight"
    assert first.difference > 0.1
    number = comparison.first_number()
    assert number is not None
    assert (number.name, number.step) == ("grad_norm", 1)  # the first loss comes before any gradient


@pytest.mark.parametrize("order", [0, 1, 2])
def test_another_order_has_the_same_samples(order: int) -> None:
    rows = np.arange(20).reshape(2, 5, 2)
    batches = [TokenBatch(part, part + 1, part[:, 0]) for part in rows]
    found = reordered(batches, order)
    assert sorted(np.concatenate([batch.sample_ids for batch in found])) == sorted(rows[..., 0].reshape(-1))
    assert all((batch.labels == batch.tokens + 1).all() for batch in found)
    if order:
        assert [list(batch.sample_ids) for batch in found] != [list(batch.sample_ids) for batch in batches]


def test_micro_batches_are_divided_for_every_step_of_a_ramp(tmp_path: Path) -> None:
    """Steps of 4 and 12 samples on two ranks: 2 at once, of the 4 that one rank takes."""
    file = tiny_yaml(tmp_path)
    content = yaml.safe_load(file.read_text())
    content["tokens"] |= {"micro_batch_size": 4, "batch_accumulation_per_replica": 3}
    content["data_stages"][0]["batch_size_ramp"] = {"start": 4, "increment": 8, "samples": 8}
    file.write_text(yaml.safe_dump(content))
    other = on_layout(file, load(file), ["parallelism.dp=2"])
    assert (other.tokens.micro_batch_size, other.tokens.batch_accumulation_per_replica) == (2, 3)
    assert other.global_batch_size == 12


@pytest.mark.budget(20, reason="the command starts ranks for both layouts, real processes that import torch")
def test_the_command_tells_the_verdict_by_its_exit_code(tmp_path: Path, nursery: Nursery) -> None:
    layout = ("parallelism.dp=2", "parallelism.strategy=support.user_parts.forgets_to_sum")
    wrong = nursery.run("compare", tiny_yaml(tmp_path), *layout, "--steps", "2", folder=tmp_path)
    assert wrong.code == 1
    assert "The layouts DIFFER: the first parameter whose gradient differs at step 1 is model.embed_" in wrong.stdout
    assert "The global batch stays 4: tokens.micro_batch_size=2 tokens.batch_accumulation_per_rep" in wrong.stderr
    refused = nursery.run("compare", tmp_path / "tiny.yaml", "optimizer.weight_decay=0", folder=tmp_path)
    assert refused.code == 2
    assert "optimizer.weight_decay: 0.1 and 0.0 are other runs; expected overrides of the layout" in refused.stderr
