"""A loss or gradient that is not finite: the module, layer, rank and samples are named, and whether it comes again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.config import Config
from kenotron.data import open_run
from support.layout_runs import train_here
from support.ranks import run_ranks
from support.tiny_run import metrics, tiny_config, train_and_listen, train_quietly

DOWN = "model.layers.1.mlp.down_proj"
TWO_MICRO_BATCHES = ("tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=2")


def hook(name: str, **kwargs: object) -> str:
    given = ", ".join(f"{key}: {value}" for key, value in kwargs.items())
    return f"general.hooks=[{{path: support.user_parts.{name}, kwargs: {{{given}}}}}]"


def line(config: Config) -> dict[str, Any]:
    (found,) = (Path(config.logging.log_dir) / config.general.run / "nonfinite_steps.jsonl").read_text().splitlines()
    return json.loads(found)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_module_is_named_and_the_micro_batch(where: str, recompute: bool, tmp_path: Path) -> None:
    spoil = hook("SpoilModule", module=DOWN, step=2, where=where)
    layout = f"parallelism.recompute_layer={str(recompute).lower()}"
    config = tiny_config(tmp_path, spoil, *TWO_MICRO_BATCHES, *([layout] if where == "backward" else []))
    _, said = train_and_listen(config)
    found = line(config)
    expected = {"iteration": 2, "where": where, "module": DOWN, "layer": 1, "ranks": [0], "again": "the same"}
    assert expected.items() <= found.items()
    with open_run(config, report=lambda line: None) as data:
        batches = data.batch(2)[1:] if where == "forward" else data.batch(2)
        assert [sample["sample"] for sample in found["samples"]] == [int(i) for b in batches for i in b.sample_ids]
    assert "computed again it is the same: not a transient fault" in said
    assert [step["skipped"] for step in metrics(config)] == [False, True, False]


def test_a_fault_that_does_not_come_again_is_called_transient_and_changes_nothing_else(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, hook("SpoilModule", module=DOWN, step=2, times=1), *TWO_MICRO_BATCHES)
    _, said = train_and_listen(config)
    assert line(config)["again"] == "finite"
    clean = train_quietly(tiny_config(tmp_path / "clean", *TWO_MICRO_BATCHES)).config
    second = metrics(clean)[1]
    assert f"finite (lm_loss {second['lm_loss']:.4g}, grad_norm {second['grad_norm']:.4g}): a transient fault" in said


@pytest.mark.parametrize(
    ("name", "kwargs", "where", "module"),
    [
        ("PoisonWeight", {"step": 1}, "weight", "model.embed_tokens.weight"),
        ("Poison", {"steps": [2]}, "gradient", "model.embed_tokens.weight"),
    ],
)
def test_a_weight_or_gradient_that_is_not_finite_is_named(
    name: str, kwargs: dict[str, object], where: str, module: str, tmp_path: Path
) -> None:
    config = train_quietly(tiny_config(tmp_path, hook(name, **kwargs))).config
    found = line(config)
    assert (found["iteration"], found["where"], found["module"], found["layer"]) == (2, where, module, None)


@pytest.mark.parametrize("module", [DOWN, "model.layers.1.self_attn.v_proj"])
def test_backward_is_looked_at_where_outputs_change_in_place(module: str, tmp_path: Path) -> None:
    """And several modules read one."""
    spoil = hook("SpoilModule", module=module, step=2, where="backward").removesuffix("]")
    config = train_quietly(tiny_config(tmp_path, f"{spoil}, support.user_parts.InPlace]", *TWO_MICRO_BATCHES)).config
    assert [line(config)[key] for key in ("where", "module", "ranks")] == ["backward", module, [0]]
    assert [step["skipped"] for step in metrics(config)] == [False, True, False]


def test_anomaly_mode_ends_the_run_with_the_operation(tmp_path: Path) -> None:
    spoil = hook("SpoilModule", module=DOWN, step=2, where="backward")
    with pytest.raises(RuntimeError, match="Function '_NanInBackwardBackward' returned nan values"):
        train_quietly(tiny_config(tmp_path, spoil, *TWO_MICRO_BATCHES, "profiler={detect_anomaly: true}"))
    assert not torch.is_anomaly_enabled()


def trained_on_two(rank: int, folder: Path, layout: str, where: str) -> None:
    keys = ("tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=2", f"general.run={where}")
    spoil = hook("SpoilModule", module=DOWN, step=2, where=where, rank=1)
    train_here(tiny_config(folder, spoil, *keys, *layout.split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "parallelism.dp=2",
        "parallelism.dp=2 optimizer.zero_stage=3",
        "parallelism.tp=2",
        "parallelism.pp=2 parallelism.pp_engine=interleaved_zero_bubble model.model_config.num_hidden_layers=4",
    ],
    ids=lambda layout: layout,
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_rank_is_named(where: str, layout: str, tmp_path: Path) -> None:
    run_ranks(2, trained_on_two, tmp_path, layout, where)
    found = line(tiny_config(tmp_path, f"general.run={where}"))
    assert [found[key] for key in ("where", "module", "layer", "ranks", "again")] == [where, DOWN, 1, [1], "the same"]
