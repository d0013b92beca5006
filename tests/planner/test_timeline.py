"""How long a step takes: traces written by hand against arithmetic, traces of real steps against measured ones."""

from __future__ import annotations

import json
import math
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from kenotron.config import Config, load
from kenotron.models.blocks import linear
from kenotron.planner import memory
from kenotron.planner.hardware import GPUS, Gpu
from kenotron.planner.memory import RankPlan, first_ranks, follow_rank, plan_memory
from kenotron.planner.rates import HOST, LINK, NETWORK, START, seconds_between, seconds_of
from kenotron.planner.speed import speed_of
from kenotron.planner.timeline import play
from kenotron.planner.trace import Began, Communicated, Event, Group, Marked, Operator, Ran, Waited
from support.plans import config_of
from support.tiny_run import REPOSITORY

# A GPU of which a byte of memory, and a byte to others, takes a second.
SLOW = Gpu("slow", "slow", 1.0, "nvidia", flops=1e30, fp32=1e30, bandwidth=1 / 0.64, link=1 / LINK, network=1 / NETWORK)
PAIR = Group("dp", 2, 2)
MICRO, UPDATE = Began("micro-batch"), Began("update")


def ran(seconds: float, queue: int = 0) -> Ran:
    return Ran(queue, Operator("memory", "here", seconds))


def seconds(*events: Event) -> float:
    return play([[MICRO, *events, UPDATE]], SLOW, 1)[0].seconds


def test_a_transfer_beside_computation_is_waited_for_only_as_long_as_it_is_longer() -> None:
    transfer = Communicated(0, "gather", 6.0, PAIR, mark=1)  # half of the bytes come from the other rank: 3 s
    (spent,) = play([[MICRO, transfer, ran(2), Waited(0, 1), ran(4), UPDATE]], SLOW, 1)
    assert spent.seconds == pytest.approx(7, abs=0.01)
    assert spent.of["waits for dp"] == pytest.approx(1, abs=0.01)
    assert seconds(transfer, ran(5), Waited(0, 1), ran(4)) == pytest.approx(9, abs=0.01)


def test_transfers_of_a_group_go_one_after_the_other_and_those_of_two_groups_side_by_side() -> None:
    first, same = Communicated(0, "gather", 6.0, PAIR, mark=1), Communicated(0, "gather", 6.0, PAIR, mark=2)
    other = same._replace(group=PAIR._replace(name="tp"))
    assert seconds(first, same, Waited(0, 2)) == pytest.approx(6, abs=0.01)
    assert seconds(first, other, Waited(0, 2)) == pytest.approx(3, abs=0.01)


def test_a_queue_of_its_own_begins_when_what_it_needs_is_there() -> None:
    """The copy on queue 1 comes after the 2 s of queue 0, and beside the next 2; then queue 0 waits 1 s more."""
    events = ran(2), Marked(0, 1), Waited(1, 1), ran(3, queue=1), Marked(1, 2), ran(2), Waited(0, 2), ran(1)
    assert seconds(*events) == pytest.approx(6, abs=0.01)


def test_the_host_may_be_what_a_step_waits_for() -> None:
    """Each kernel is asked for by the host; after the host has waited for the device, they are asked for late."""
    tiny = [ran(1e-9)] * 1000
    assert seconds(*tiny) == pytest.approx(1000 * HOST, rel=0.1)
    assert seconds(ran(5), *tiny) == pytest.approx(5, rel=0.01)
    assert seconds(ran(5), Marked(0, 1), Waited(None, 1), *tiny) == pytest.approx(5 + 1000 * HOST, rel=0.01)


def pipeline(stages: int, count: int) -> list[list[Event]]:
    """1F1B: forward takes 1 s, backward 2 s, messages nothing, the update 0."""
    group, traces = Group("pp", stages, stages), []
    for stage in range(stages):
        events: list[Event] = []
        marks = iter(range(1, 10 * count))

        def do(length: float, source: int, target: int, events: list[Event] = events, marks: object = marks) -> None:
            if 0 <= source < stages:
                events.append(Communicated(0, "receive", 0.0, group, mark := next(marks), source))  # type: ignore[call-overload]
                events.append(Waited(0, mark))
            events.append(ran(length))
            if 0 <= target < stages:
                events.append(Communicated(0, "send", 0.0, group, next(marks), target))  # type: ignore[call-overload]

        warm = min(stages - stage - 1, count)
        order = ["f"] * warm + ["f", "b"] * (count - warm) + ["b"] * warm
        for what in order:
            if what == "f":
                events.append(MICRO)
                do(1, stage - 1, stage + 1)
            else:
                do(2, stage + 1, stage - 1)
        traces.append([*events, UPDATE])
    return traces


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 4), (4, 12)])
def test_the_bubble_of_1f1b_is_that_of_its_paper(stages: int, count: int) -> None:
    """(stages - 1) x (forward + backward): Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1."""
    ranks = play(pipeline(stages, count), SLOW, count)
    for spent in ranks:
        assert spent.seconds == pytest.approx(3 * (count + stages - 1), rel=0.01)
        assert spent.of["waits for pp"] == pytest.approx(3 * (stages - 1), rel=0.01)


def test_micro_batches_that_were_not_followed_take_what_the_slowest_stage_needs() -> None:
    (followed,) = {each.seconds for each in play(pipeline(4, 12), SLOW, 40)}
    (every,) = {each.seconds for each in play(pipeline(4, 40), SLOW, 40)}
    assert followed == pytest.approx(every, rel=0.001)


def test_micro_batches_that_were_not_followed_wait_for_a_slow_host() -> None:
    def of_small_kernels(traces: list[list[Event]]) -> list[list[Event]]:
        """Each operator as 100 that a host asks for more slowly than they run."""
        small = [ran(1e-9)] * 100
        return [[each for old in trace for each in (small if isinstance(old, Ran) else [old])] for trace in traces]

    (followed,) = {each.seconds for each in play(of_small_kernels(pipeline(4, 8)), SLOW, 40)}
    (every,) = {each.seconds for each in play(of_small_kernels(pipeline(4, 40)), SLOW, 40)}
    assert followed == pytest.approx(every, rel=0.03)


def test_stages_that_wait_for_each_other_are_an_error() -> None:
    group = Group("pp", 2, 2)
    waiting = [[MICRO, Communicated(0, "receive", 0.0, group, 1, peer), Waited(0, 1), UPDATE] for peer in (1, 0)]
    with pytest.raises(ValueError, match="2 of 2 stages wait for messages that no stage sends"):
        play(waiting, SLOW, 1)


def followed_whole(config: Config, gpu: Gpu, rank: int) -> RankPlan:
    """A rank whose micro-batches are all followed."""
    with patch.object(memory, "micro_batches_to_follow", lambda _: config.tokens.batch_accumulation_per_replica):
        return follow_rank(config, gpu, rank)


@pytest.mark.cases(slow=2)
@pytest.mark.budget(45, reason="two plans of up to two ranks each")
@pytest.mark.parametrize(
    "case",
    [
        "llama|pp=2 engine=1f1b accum=8|model.model_config.num_hidden_layers=2",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                "llama|pp=2 engine=zbv_zero_bubble accum=16",
                "llama|dp=2 zero=1 accum=8",
                "llama|dp=2 zero=3 accum=8",
                "mixtral|dp=2 ep=2 accum=8|model.dtype=bfloat16",
                "llama|pp=2 engine=interleaved_1f1b accum=16",
            )
        ),
    ],
)
def test_a_step_takes_as_long_as_if_all_its_micro_batches_were_followed(case: str) -> None:
    """On a GPU that is slow beside its host, as large models make each."""
    gpu = GPUS["h100"]._replace(bandwidth=1e9, flops=1e10, fp32=1e10)
    config = config_of(case)
    some = plan_memory(config, gpu)
    with get_context("forkserver").Pool(2, maxtasksperchild=1) as pool:
        whole = pool.map(partial(followed_whole, config, gpu), first_ranks(config), chunksize=1)
    assert len(some[0].events) < len(whole[0].events)
    assert speed_of(config, gpu, some).seconds == pytest.approx(speed_of(config, gpu, whole).seconds, rel=0.01)


@pytest.mark.budget(20, reason="plans of one rank each")
@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
def test_recomputation_repeats_one_of_the_two_sums_of_a_layer(mode: str) -> None:
    """The other one is of the layer's output, and no operator saves it for backward."""

    def sums(recompute: str) -> int:
        config = config_of(f"llama|tp=2 mode={mode}|model.dtype=bfloat16|parallelism.recompute_layer={recompute}")
        (plan,) = plan_memory(config, GPUS["h100"])
        kind = {"ALL_REDUCE": "sum", "REDUCE_SCATTER": "scatter"}[mode]
        tp = [each for each in plan.events if isinstance(each, Communicated) and each.group.name == "tp"]
        return sum(each.kind == kind for each in tp)

    once, layers, micro_batches = sums("false"), 4, 2
    assert [sums("true") - once, sums("selective") - once] == [layers * micro_batches] * 2


def test_what_a_collective_sends_over_which_wire() -> None:
    gpu, size = GPUS["h100"], 1e9
    inside, across = Group("tp", 8, 8), Group("dp", 64, 8)
    alone = Group("dp", 64, 1)  # one rank of each machine
    assert seconds_between("gather", size, inside, gpu) == pytest.approx(size * 7 / 8 / (LINK * 450e9), rel=0.05)
    assert seconds_between("sum", size, inside, gpu) == pytest.approx(2 * size * 7 / 8 / (LINK * 450e9), rel=0.05)
    # Eight network cards of a machine are together nearly as fast as its links, one is not.
    assert seconds_between("gather", size, across, gpu) == pytest.approx(size * 63 / 64 / (NETWORK * 8 * 50e9), rel=0.1)
    assert seconds_between("gather", size, alone, gpu) == pytest.approx(size * 63 / 64 / (NETWORK * 50e9), rel=0.1)
    assert seconds_between("exchange", size, alone, gpu) == pytest.approx(size * 63 / 64 / (NETWORK * 50e9), rel=0.1)
    assert seconds_between("send", size, inside, gpu) == pytest.approx(size / (LINK * 450e9), rel=0.05)
    few = [seconds_between("sum", 8.0, Group("world", 8 * machines, 8), gpu) for machines in (1, 64, 1024)]
    assert START < few[0] < few[1] < few[2] < 1e-3  # a tree over machines, not a ring
    assert math.isclose(few[2] - few[1], few[1] - few[0], rel_tol=1)


def test_a_product_of_few_blocks_leaves_processors_idle() -> None:
    def product(rows: int, inner: int, columns: int) -> Operator:
        flops = 2.0 * rows * inner * columns
        return Operator("product", "", 0.0, flops, (rows, inner, columns), torch.bfloat16)

    gpu, large, small = GPUS["h100"], product(8192, 4096, 4096), product(512, 2048, 1024)
    assert seconds_of(large, gpu) == pytest.approx(large.flops / (gpu.products * 989e12))
    assert seconds_of(small, gpu) == pytest.approx(small.flops / (gpu.products * 989e12) * 132 / 32)
    assert seconds_of(large._replace(dtype=torch.float32), gpu) == pytest.approx(large.flops / (gpu.products * 67e12))


@pytest.mark.budget(20, reason="plans of one rank each")
def test_mfu_counts_the_scores_that_a_loss_asks_for() -> None:
    """The headless loss tells a token from those of its sequence, not from the vocabulary: less work in the head."""
    flops = []
    tied = "llama|dp=1|model.model_config.tie_word_embeddings=true|model.model_config.z_loss_enabled=false"
    for case in (tied, f"{tied}|model.loss={{name: headless}}"):
        config, gpu = config_of(case), GPUS["h100"]
        speed = speed_of(config, gpu, plan_memory(config, gpu))
        flops.append(speed.mfu * gpu.flops / speed.tokens_per_second)
    model, length = config.model.decoder, max(config.sequence_lengths.values())
    assert flops[0] - flops[1] == pytest.approx(3 * 2 * model.hidden_size * (model.vocab_size - length))


MEASURED = [  # case and contender of benchmarks/results/gpu.json, and the config
    ("llama-3.2-1b 4096", "kenotron", "llama-3.2-1b.yaml", "false"),
    pytest.param(
        "llama-3.1-8b 4096 recompute", "kenotron compiled", "llama-3.1-8b.yaml", "true", marks=pytest.mark.slow
    ),
    pytest.param(
        "llama-3.1-8b 4096 selective", "kenotron compiled", "llama-3.1-8b.yaml", "selective", marks=pytest.mark.slow
    ),
]


def followed_as_measured(config: Config, gpu: Gpu) -> RankPlan:
    """The step of 2026-11-28, in which autograd still added and cast the gradients of linears that share an input."""
    with patch.object(linear, "adds_inside", lambda x: False):
        return follow_rank(config, gpu, 0)


@pytest.mark.budget(40, reason="plans a model of 1B")
@pytest.mark.parametrize(("case", "contender", "file", "recompute"), MEASURED)
def test_time_and_memory_are_near_those_measured_on_an_h200(
    case: str, contender: str, file: str, recompute: str
) -> None:
    rows = json.loads((REPOSITORY / "benchmarks" / "results" / "gpu.json").read_text())["rows"]
    (turn,) = (each["turns"][0] for each in rows if (each["case"], each["contender"]) == (case, contender))
    one_rank = ("parallelism={dp: 1, tp: 1, pp: 1}", "optimizer.zero_stage=0", "tokens.sequence_length=4096")
    batch = ("tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=1")
    path = Path(REPOSITORY, "examples", "models", file)
    config = load(path, [*one_rank, *batch, f"parallelism.recompute_layer={recompute}"])
    with get_context("forkserver").Pool(1) as pool:
        plans = [pool.apply(followed_as_measured, (config, GPUS["h200"]))]
    assert speed_of(config, GPUS["h200"], plans).seconds == pytest.approx(turn["seconds"], rel=0.05)
    assert plans[0].peak.bytes / 2**30 == pytest.approx(turn["peak_allocated"] / 2**30, rel=0.05)
