"""Mixtures of experts mean on every layout what they mean in one process: losses, gradients, loads of the experts.

The losses of the router are on, ten times as large as usual: a gradient of theirs that is counted once for every rank,
micro-batch, recomputation or pipeline stage shows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.config.errors import InputError
from kenotron.parallel.mesh import axes, build_mesh
from support.layout_runs import SPARSE, Problem, on, prepared, steps
from support.ranks import run_ranks

PROBLEMS = {family: Problem(family, steps=3, model=keys) for family, keys in SPARSE.items()}
WITH_A_CAPACITY = {"moe_expert_capacity_factor": 0.8, "router_aux_loss_scope": "global_batch"}
FURTHER = Problem("further", steps=3, model=SPARSE["deepseek_v3"] | {"num_nextn_predict_layers": 2})
DROPPING = Problem("dropping", steps=3, model=SPARSE["mixtral"] | WITH_A_CAPACITY)
TWO_LAYERS = {"num_hidden_layers": 2}
SIX = Problem("six", steps=3, model=SPARSE["mixtral"] | TWO_LAYERS | {"num_local_experts": 6})
ODD = {"hidden_size": 15, "head_dim": 6, "intermediate_size": 50, "num_local_experts": 2}  # 4 ranks divide none
TWO = Problem("two", steps=3, model=SPARSE["mixtral"] | TWO_LAYERS | ODD)
COMPILED = Problem("compiled", steps=3, model=SPARSE["mixtral"] | TWO_LAYERS)
KNOWN = PROBLEMS | {"dropping": DROPPING, "six": SIX, "two": TWO, "further": FURTHER, "compiled": COMPILED}
ROUNDING = 5e-6
QUICK = [
    *((each, 4, "dp=2 zero=2 tp=2 ep=2 mode=REDUCE_SCATTER recompute=true") for each in ("qwen2_moe", "deepseek_v3")),
    *(("mixtral", 4, "dp=4 ep=2 zero=3"), ("olmoe", 4, "dp=2 cp=2 ep=2")),
    *(("mixtral", 2, "pp=2 engine=1f1b"), ("deepseek_v3", 2, "cp=2 method=allgather")),
]
LAYOUTS = [
    *on(2, "dp=2 ep=2", "dp=2 ep=2 zero=3 recompute=true", "cp=2 ep=2"),
    *on(4, "dp=4 ep=2 zero=1", "dp=4 ep=2 zero=3 accum=4", "dp=4 ep=2", "dp=4 shard=2 zero=2 ep=2"),
    *on(4, "dp=2 cp=2 ep=2 zero=2", "dp=2 tp=2 ep=2 mode=REDUCE_SCATTER", "dp=2 tp=2 ep=2 zero=2"),
    *on(4, "dp=2 pp=2 ep=2 engine=1f1b", "dp=2 pp=2 ep=2 engine=interleaved_1f1b zero=1 accum=4"),
    *on(4, "dp=2 pp=2 ep=2 engine=zbv_zero_bubble accum=4"),
    *on(8, "dp=4 tp=2 ep=2 zero=3 mode=REDUCE_SCATTER recompute=true"),
    *on(8, "dp=2 tp=2 pp=2 ep=2 zero=1 mode=REDUCE_SCATTER"),
    # without expert parallelism
    *on(1, "accum=4 recompute=true"),
    *on(2, "dp=2", "dp=2 zero=3 accum=4", "tp=2", "tp=2 mode=REDUCE_SCATTER async=true", "cp=2"),
    *on(2, "cp=2 method=ulysses zero=1", "pp=2 engine=interleaved_1f1b accum=4", "pp=2 engine=zbv_zero_bubble accum=4"),
    *on(2, "pp=2 engine=interleaved_zero_bubble accum=4", "pp=2 engine=dualpipev accum=4 recompute=true"),
    *on(4, "tp=4", "dp=2 zero=1 pp=2 engine=afab recompute=true", "tp=2 cp=2 mode=REDUCE_SCATTER"),
    *on(4, "dp=4 shard=2 zero=3"),
    *on(8, "dp=2 zero=2 tp=2 pp=2 engine=1f1b mode=REDUCE_SCATTER"),
]
LAYOUTS_OF_FURTHER = [
    *on(1, "accum=4 recompute=true"),
    *on(2, "dp=2 zero=3 accum=4", "dp=2 zero=1", "tp=2"),
    *on(4, "dp=4 ep=2 zero=2", "dp=4 shard=2 zero=3", "dp=2 zero=3 tp=2 ep=2 mode=REDUCE_SCATTER recompute=true"),
]
LAYOUTS_THAT_DROP = [
    *on(1, "accum=8 recompute=true"),
    *on(2, "dp=2 zero=3 accum=4", "tp=2 mode=REDUCE_SCATTER", "pp=2 engine=zbv_zero_bubble accum=4"),
    *on(4, "dp=2 tp=2 ep=2 zero=2"),
]


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.cases(2)
@pytest.mark.budget(8, reason="four ranks, whose experts and attention are kernels of their own, on two cores")
@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        *QUICK,
        *slow(("compiled", 2, "dp=2 ep=2 zero=3 compile=true"), ("olmoe", 1, "compile=true recompute=true")),
        *slow(*((family, *layout) for layout in sorted(LAYOUTS) for family in PROBLEMS)),
    ],
)
def test_a_layout_means_what_one_process_means(family, world_size, layout, like_one_process):
    like_one_process(world_size, KNOWN[family], layout, ROUNDING)


@pytest.mark.parametrize(
    ("which", "world_size", "layout"),
    [
        ("further", 2, "dp=2 zero=3 ep=2 recompute=true"),
        ("dropping", 2, "dp=2 ep=2 accum=4 recompute=true"),
        *slow(*(("further", *layout) for layout in LAYOUTS_OF_FURTHER)),
        *slow(*(("dropping", *layout) for layout in LAYOUTS_THAT_DROP)),
    ],
)
def test_further_tokens_and_what_is_dropped_do_not_depend_on_the_layout(which, world_size, layout, like_one_process):
    """Nor does a balance loss that takes the loads of the batch before."""
    like_one_process(world_size, KNOWN[which], layout, ROUNDING)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "dp=4 ep=2 zero=3"),
        *slow((4, "dp=4 zero=2 accum=4"), (8, "dp=4 tp=2 zero=3 recompute=true")),
        *slow((8, "dp=4 tp=2 ep=2 zero=1 mode=REDUCE_SCATTER"), (8, "dp=8 shard=4 zero=3")),
    ],
)
def test_experts_that_the_ranks_do_not_divide_are_cut_inside(world_size, layout, like_one_process):
    """FSDP2 cuts by experts, and pads: of six over four ranks three would hold two each, and one none."""
    held = [seen.local_numbers for seen in like_one_process(world_size, SIX, layout, ROUNDING)]
    assert max(held) < 1.02 * min(held)  # the router's six rows are cut by rows


@pytest.mark.budget(8, reason="four ranks, whose experts and attention are kernels of their own, on two cores")
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, "dp=4 zero=3 recompute=true"),
        *slow((4, "dp=4 zero=1 accum=2"), (4, "dp=2 cp=2 zero=2"), (8, "dp=4 tp=2 zero=3 mode=REDUCE_SCATTER")),
        *slow((8, "dp=4 pp=2 zero=1 engine=1f1b"), (8, "dp=8 shard=4 zero=3"), (8, "dp=8 ep=2 zero=3")),
    ],
)
def test_experts_that_ranks_would_pad_are_split_over_fewer(world_size, layout, like_one_process, tmp_path):
    """FSDP2 would give two of four ranks an expert, and have all gather four in the place of two."""
    held = [seen.local_numbers for seen in like_one_process(world_size, TWO, layout, ROUNDING)]
    assert max(held) < 1.5 * min(held)  # other weights have 15 rows
    degrees = axes(TWO.config(layout, tmp_path))
    assert degrees["expert_shard"] == 2
    assert degrees["expert_replicate"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp=4 tp=2 ep=2 zero=3", "dp=4 tp=2 ep=2 zero=1 accum=2 mode=REDUCE_SCATTER"])
def test_an_expert_that_no_ranks_split_is_replicated_under_zero(layout, like_one_process, tmp_path):
    """Two ranks have half of an expert of 25 x 15: cut by experts, one would hold it and both would gather two."""
    like_one_process(8, TWO, layout, ROUNDING)
    degrees = axes(TWO.config(layout, tmp_path))
    assert (degrees["expert_replicate"], degrees["expert_shard"]) == (2, 1)


def test_experts_that_ep_does_not_divide_are_named(tmp_path: Path) -> None:
    said = "parallelism.expert_parallel_size: expected a divisor of the 4 experts of a layer, found 8"
    with pytest.raises(InputError, match=said):
        PROBLEMS["mixtral"].config("dp=8 ep=8", tmp_path)


def biases_in_bf16(rank: int, folder: Path) -> tuple[torch.dtype, list[float]]:
    """The dtype of a router's bias in the forward pass of a bf16 run under ZeRO-3, and its values after three steps."""
    keys = SPARSE["deepseek_v3"] | {"router_bias_update_rate": 0.001}
    config = Problem("bf16", steps=3, model=keys).config("dp=2 zero=3 model.dtype=bfloat16", folder)
    with prepared(config, build_mesh(axes(config), 2, "cpu")) as run:
        router = run.model.model.layers["1"].mlp.gate
        router.e_score_correction_bias.data.add_(1.0)
        seen = []
        router.register_forward_pre_hook(lambda module, inputs: seen.append(module.e_score_correction_bias.dtype))
        steps(run)
        return seen[-1], router.e_score_correction_bias.tolist()


@pytest.mark.budget(8, reason="two ranks, and torch's FSDP")
def test_biases_move_by_less_than_bf16_has(tmp_path: Path) -> None:
    (dtype, biases), other = run_ranks(2, biases_in_bf16, tmp_path)
    assert (dtype, biases) == other
    assert dtype == torch.float32
    moved = [round((bias - 1) * 1000, 2) for bias in biases]
    assert set(moved) <= {-3, -2, -1, 0, 1, 2, 3}
    assert any(moved)
