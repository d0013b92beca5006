"""Data parallelism is one process in every form; and it sends when, and holds what, its stage says."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from kenotron.config.errors import InputError
from kenotron.config.parallelism import Parallelism
from kenotron.parallel import data
from kenotron.parallel.mesh import axes, build_mesh
from support.data_parallel_run import Layout, Record, train
from support.ranks import ROUNDING, relative_error, run_ranks

SEQUENCES = 12  # of a step
STAGES = (0, 1, 2, 3)
SLOW = pytest.mark.slow
STAGES_OF_EACH_KIND = [pytest.param(stage, marks=SLOW) if stage in (1, 2) else stage for stage in STAGES]
ONE_OR_THREE = [pytest.param(1, marks=SLOW), 3]  # three micro-batches meet all that one does, and more
MESHES = {
    "two ranks": (("dp_shard", 2),),
    "four ranks": (("dp_shard", 4),),
    "hybrid": (("dp_replicate", 2), ("dp_shard", 2)),
    "with cp": (("dp_shard", 2), ("cp", 2)),
    "with tp": (("dp_shard", 2), ("tp", 2)),
}
QUICK = {"two ranks": (0, 3), "four ranks": (1, 2), "hybrid": STAGES, "with cp": (0, 1, 3), "with tp": (2, 3)}
STAGES_ON_MESHES = [
    (mesh, stage) if stage in QUICK[mesh] else pytest.param(mesh, stage, marks=SLOW)
    for mesh in MESHES
    for stage in STAGES
]


@cache
def alone(layout: Layout) -> Record:
    return train(0, layout, SEQUENCES)


@cache
def together(layout: Layout) -> Record:
    """What the ranks agree on: every one of them has the same losses, gradients and weights."""
    first, *others = run_ranks(layout.ranks, train, layout, SEQUENCES)
    for other in others:
        assert other.losses == first.losses
        assert other.norms == pytest.approx(first.norms, rel=1e-6)
        assert all(torch.equal(other.weights[name], first.weights[name]) for name in first.weights)
    return first


def same_as_alone(layout: Layout, gradient: float = ROUNDING, loss: float = 1e-6, weight: float = 1e-4) -> Record:
    found, expected = together(layout), alone(layout.alone)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, value in found.gradients.items():
        assert value.dtype == torch.float32
        assert relative_error(value, expected.gradients[name]) < gradient, f"gradient of {name}"
    assert found.losses == pytest.approx(expected.losses, rel=loss)
    assert found.norms == pytest.approx(expected.norms, rel=10 * loss)
    for name, value in found.weights.items():
        assert (value - expected.weights[name]).abs().max() < weight, f"weight {name}"
    return found


@pytest.mark.cases(4)
@pytest.mark.parametrize("micro_batches", ONE_OR_THREE)
@pytest.mark.parametrize(("mesh", "stage"), STAGES_ON_MESHES)
def test_every_stage_on_every_mesh_is_one_process(mesh: str, stage: int, micro_batches: int) -> None:
    same_as_alone(Layout(MESHES[mesh], stage, micro_batches))


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "also",
    [
        {"tied": True, "even": False, "recompute": True},
        *(pytest.param(each, marks=SLOW) for each in ({"tied": True}, {"even": False})),
    ],
    ids=str,
)
def test_tied_weights_uneven_shards_and_recomputation_change_nothing(stage: int, also: dict[str, bool]) -> None:
    """Uneven: 50, 27, 18 and 6 rows over four ranks, so some shards are short and some empty."""
    same_as_alone(Layout(MESHES["four ranks"], stage, micro_batches=3, **also))


@pytest.mark.cases(1)
@pytest.mark.budget(15, reason="every rank compiles the blocks")
@pytest.mark.parametrize("stage", STAGES_OF_EACH_KIND)
def test_compiled_blocks_change_nothing(stage: int) -> None:
    same_as_alone(Layout(MESHES["two ranks"], stage, micro_batches=2, compile=True), gradient=2e-6)


@pytest.mark.cases(3)
@pytest.mark.parametrize("micro_batches", ONE_OR_THREE)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mesh", ["two ranks", "hybrid"])
def test_bf16_keeps_fp32_masters_and_fp32_sums(mesh: str, stage: int, micro_batches: int) -> None:
    """Weights round to bf16 where one process rounds them, and products; what is added up, nowhere.

    So stages differ from one another as little as in fp32, and from one process by the rounding of its larger products.
    """
    layout = Layout(MESHES[mesh], stage, micro_batches, bf16=True, tied=True)
    found = same_as_alone(layout, gradient=1e-2, loss=1e-3, weight=6e-2)
    stage_0 = together(replace(layout, zero_stage=0))
    for name, value in found.gradients.items():
        assert relative_error(value, stage_0.gradients[name]) < ROUNDING, name


@pytest.mark.cases(4)
@pytest.mark.parametrize("mesh", ["two ranks", "hybrid"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_travel_when_the_stage_says(stage: int, mesh: str) -> None:
    """Stages 0 and 1 in the last of three micro-batches, 2 and 3 in each; 3 alone gathers weights again."""
    record = together(Layout(MESHES[mesh], stage, micro_batches=3))
    sums = [sum(name in ("allreduce_", "_reduce_scatter_base_") for name in names) for names in record.collectives]
    gathers = [sum("allgather" in name for name in names) for names in record.collectives]
    groups = 3  # two blocks and the root
    if stage == 0:
        assert sums == [0, 0, 4]  # 21 gradients of 53 KiB, 16 KiB or more at a time
        assert gathers == [0, 0, 0]
        return
    each = groups * (2 if mesh == "hybrid" else 1)  # scattered in the group, and summed across groups
    assert sums == ([0, 0, each] if stage == 1 else [each] * 3)
    # Forward gathers blocks and root; backward the blocks again.
    assert gathers == ([groups + 2] * 3 if stage == 3 else [groups, 0, 0])


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("stage", [1, 3])
def test_on_gpus_a_block_is_gathered_when_the_one_before_it_begins_to_compute(stage: int, recompute: bool) -> None:
    layout = Layout(MESHES["two ranks"], stage, 2, recompute=recompute, strategy="support.data_parallel_run.as_on_gpus")
    short = {"_allgather_base_": "gather", "_reduce_scatter_base_": "sum"}
    first, last = ([short.get(name, name) for name in names] for names in same_as_alone(layout).collectives)
    sums = ["sum"] * 3
    forward = ["gather", "gather", "gather", "block 0", "block 1"]  # the root, both blocks: all before block 1 needs it
    if stage == 1:
        assert first[:5] == forward
        assert "gather" not in first[5:] + last
        assert [name for name in last if name == "sum"] == sums
        return
    again = 2 if recompute else 1
    backward = ["gather", "gather", *["block 1"] * again, "sum", *["block 0"] * again, "sum", "sum"]
    assert first == last == forward + backward


def test_replicas_sum_at_the_end_what_no_backward_was_announced_for() -> None:
    record = same_as_alone(Layout(MESHES["two ranks"], 0, micro_batches=3, tied=True, announced=False))
    assert [len(names) for names in record.collectives] == [0, 0, 4]


@pytest.mark.parametrize(("bucket_kb", "sums"), [(0, 21), (5, 12), (25 << 10, 1)])
def test_replicas_sum_as_much_together_as_they_are_told(bucket_kb: int, sums: int) -> None:
    for bf16 in (False, True):
        layout = Layout(MESHES["two ranks"], 0, micro_batches=2, bf16=bf16, bucket_kb=bucket_kb)
        record = same_as_alone(layout, *((1e-2, 1e-3, 6e-2) if bf16 else ()))
        assert [len(names) for names in record.collectives] == [0, sums]


@pytest.mark.cases(4)
@pytest.mark.parametrize("mesh", ["four ranks", "hybrid"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_keeps_between_steps_what_its_stage_says(stage: int, mesh: str) -> None:
    record, whole = together(Layout(MESHES[mesh], stage, micro_batches=3)), alone(Layout(micro_batches=3))
    share = 1 if stage == 0 else dict(MESHES[mesh])["dp_shard"]
    for kind in ("weights", "gradients", "state"):  # the vocabulary's 50 rows do not divide by four: 13 of them
        assert whole.bytes[kind] / share <= record.bytes[kind] < 1.06 * whole.bytes[kind] / share, kind


@pytest.mark.parametrize(
    ("path", "message"),
    [("no_such.f", "cannot import"), ("support.ranks.ROUNDING", "expected a function"), ("torch.nope", "nope")],
)
def test_a_strategy_that_is_none_is_named(path: str, message: str) -> None:
    with pytest.raises(InputError, match=f"parallelism.strategy: .*{message}"):
        data.load_strategy(path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_on_a_cpu_run_offloaded_shards_are_where_they_were(stage: int) -> None:
    same_as_alone(Layout(MESHES["two ranks"], stage, cpu_offload=True))


def test_offloading_what_nothing_shards_is_refused() -> None:
    with pytest.raises(InputError, match=r"parallelism.cpu_offload: .*expected optimizer.zero_stage 1, 2, 3"):
        data.apply(torch.nn.Linear(2, 2), [], build_mesh({}, 1, "cpu"), zero_stage=3, cpu_offload=True)


@pytest.mark.parametrize(
    ("dp", "cp", "tp", "ranks_on_machine", "replicate", "shard"),
    [
        (8, 1, 1, 4, 2, 4),  # two machines of four
        (8, 1, 2, 8, 2, 4),  # two machines of eight: four replicas of two ranks each
        (8, 2, 2, 8, 4, 2),
        (4, 1, 1, 8, 1, 4),  # one machine has room to spare
        (6, 1, 1, 4, 3, 2),  # groups of four would straddle machines, and do not divide six
        (4, 1, 3, 8, 4, 1),  # a replica straddles machines already
        (4, 1, 4, 2, 4, 1),
    ],
)
def test_hybrid_groups_stay_on_one_machine(dp, cp, tp, ranks_on_machine, replicate, shard):
    layout = Parallelism(dp=dp, context_parallel_size=cp, tp=tp)
    degrees = axes(SimpleNamespace(parallelism=layout, zero_stage="hybrid", expert_sizes=()), ranks_on_machine)  # type: ignore[arg-type]
    assert (degrees["dp_replicate"], degrees["dp_shard"]) == (replicate, shard)
