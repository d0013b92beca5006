"""How layers are shared out over stages, and what a schedule makes of them: its order, its bubble, its limits."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

import kenotron as kn
from kenotron.config import Config
from kenotron.config.errors import InputError
from kenotron.config.parallelism import PP_ENGINES, ZERO_BUBBLE_ENGINES
from kenotron.parallel import pipeline
from kenotron.parallel.pipeline_layout import bubble, split_layers
from support.layout_runs import SHORT
from support.tiny_run import tiny_dict


def config_of(layout: str) -> Config:
    plain = tiny_dict(Path("nowhere"))
    plain["model"]["model_config"]["num_hidden_layers"] = 32
    plain["optimizer"]["zero_stage"] = None
    given = (part.split("=") for part in layout.split())
    return kn.load(plain, [f"{SHORT[name]}={value}" for name, value in given])


# ---- layers ----


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 40))
def test_no_other_split_has_a_cheaper_dearest_stage(costs: list[int], stages: int, last: int) -> None:
    stages = min(stages, len(costs))
    counts = split_layers(costs, stages, last=last)
    assert sum(counts) == len(costs)
    assert len(counts) == stages
    assert min(counts) >= 1

    def dearest(counts: Sequence[int]) -> int:
        ends = [sum(counts[:stage]) for stage in range(stages + 1)]
        sums = [sum(costs[begin:end]) for begin, end in pairwise(ends)]
        sums[-1] += last
        return max(sums)

    every = ((0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert dearest(counts) == min(dearest([b - a for a, b in pairwise(cuts)]) for cuts in every)


def test_more_stages_than_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        split_layers([1.0, 1.0], 3)


# ---- the bubble and the limits ----


class FakeStage:
    """As much of a stage as torch's schedules ask for before they run."""

    submod = None

    def __init__(self, index: int, stages: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, pp, 0


def stages_of(pp: int, per_rank: int) -> list[FakeStage]:
    return [FakeStage(turn * pp, pp * per_rank, pp) for turn in range(per_rank)]


def order_of(engine: str, pp: int, count: int, per_rank: int) -> dict[int, list[tuple[str, int, int]]]:
    """(kind, stage, micro-batch) of every rank's work in its order, as torch's schedule does it."""
    if engine == "afab" or (engine == "1f1b" and count < pp):
        return {r: [(kind, r, m) for kind in "FB" for m in range(count)] for r in range(pp)}
    if engine == "1f1b":  # what Schedule1F1B does in its loop; its `pipeline_order` is for drawing only
        return {r: list(_one_forward_one_backward(r, pp, count)) for r in range(pp)}
    stages = stages_of(pp, per_rank)
    order = pipeline.SCHEDULES[engine](stages, count, loss_fn=lambda output, target: output).pipeline_order
    parts = {r: [each for a in actions if a for each in (a.sub_actions or (a,))] for r, actions in order.items()}
    return {
        rank: [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in actions]
        for rank, actions in parts.items()
    }


def _one_forward_one_backward(rank: int, pp: int, count: int) -> Iterator[tuple[str, int, int]]:
    ahead = min(count, pp - rank)
    yield from (("F", rank, m) for m in range(ahead))
    for m in range(count):
        yield "B", rank, m
        if ahead + m < count:
            yield "F", rank, ahead + m


def play(order: dict[int, list[tuple[str, int, int]]], stages: int, split: bool) -> float:
    """The share of waiting when every rank does its work in order, each piece as soon as what it needs is there."""
    costs = {"F": 1, "B": 2, "I": 1, "W": 1} if split else {"F": 1, "B": 2, "I": 2, "W": 0}
    clock, done = dict.fromkeys(order, 0), {("F", -1, m): 0 for m in range(1000)}
    queues = {rank: list(reversed(work)) for rank, work in order.items()}
    while any(queues.values()):
        before = len(done)
        for rank, queue in queues.items():
            while queue:
                kind, stage, m = queue[-1]
                needs = ("F", stage - 1, m) if kind == "F" else ("B", stage + 1, m)
                if kind in "BI" and stage == stages - 1:
                    needs = ("F", stage, m)
                if kind != "W" and needs not in done:
                    break
                clock[rank] = max(clock[rank], done.get(needs, 0) if kind != "W" else 0) + costs[kind]
                done["B" if kind == "I" else kind, stage, m] = clock[rank]
                queue.pop()
        assert len(done) > before, "nobody can go on"
    busy = sum(costs[kind] for kind, _, _ in order[0])
    return 1 - busy / max(clock.values())


@pytest.mark.cases(6)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("engine", "per_rank"), [*((e, 1) for e in PP_ENGINES[:2]), *((e, 2) for e in PP_ENGINES[2:])])
def test_the_predicted_bubble_is_that_of_the_schedule_played_through(engine: str, per_rank: int, split: bool) -> None:
    for pp in (2, 3, 4, 8):
        for count in (1, 2, 3, 4, 6, 8, 12, 16, 32):
            if limits(engine, pp, count):
                continue
            for v in (2, 3, 4) if engine.startswith("interleaved") else (per_rank,):
                found = play(order_of(engine, pp, count, v), pp * v, split)
                assert bubble(engine, pp, count, v, split) == pytest.approx(found), (pp, count, v)


@pytest.mark.parametrize("engine", PP_ENGINES[2:])
def test_a_stage_has_less_than_twice_the_stages_of_micro_batches_under_way(engine: str) -> None:
    """So what a later stage has sent back so long ago has arrived, and waiting for it cannot hang."""
    for pp in (2, 3, 4, 8):
        for count in (4, 8, 12, 16, 32, 64):
            if limits(engine, pp, count):
                continue
            for v in (2, 3, 4) if engine.startswith("interleaved") else (2,):
                backward: Counter[int] = Counter()  # done by each stage, in order
                for work in order_of(engine, pp, count, v).values():
                    for kind, stage, m in work:
                        if kind in "BI":
                            assert m == backward[stage]
                            backward[stage] += 1
                        assert kind != "F" or m - backward[stage] < 2 * pp * v


def limits(engine: str, pp: int, count: int) -> str | None:
    """What the config says against so many micro-batches."""
    try:
        config_of(f"pp={pp} engine={engine} accum={count}")
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("engine", PP_ENGINES)
def test_the_config_refuses_the_numbers_of_micro_batches_that_torch_refuses(engine: str) -> None:
    per_rank = 1 if engine in PP_ENGINES[:2] else 2
    for pp in (2, 3, 4):
        for count in range(1, 14):
            stages = stages_of(pp, per_rank)
            kind = pipeline.schedule_of(engine, pp * per_rank, count)
            single = issubclass(kind, schedules.PipelineScheduleSingle)
            try:
                kind(stages[0] if single else stages, count, loss_fn=lambda output, target: output)
                refused = False
            except ValueError:
                refused = True
            said = limits(engine, pp, count)
            assert (said is not None) == refused, (pp, count, said)
            assert said is None or "tokens.batch_accumulation_per_replica" in said


@pytest.mark.parametrize("zero_stage", ["3", "hybrid"])
@pytest.mark.parametrize("engine", ZERO_BUBBLE_ENGINES)
def test_weights_that_are_dropped_after_forward_are_refused_with_split_backward(engine: str, zero_stage: str) -> None:
    said = rf"optimizer\.zero_stage: {zero_stage} frees gathered weights .* pp_engine {engine}"
    with pytest.raises(InputError, match=said):
        config_of(f"pp=2 dp=2 engine={engine} zero={zero_stage} accum=4")


def warn_of(layout: str) -> None:
    """As a run of `layout` warns."""
    config = config_of(layout)
    pipeline.warn_of_idle_ranks(config.parallelism, config.tokens.batch_accumulation_per_replica, config.model.compile)


def test_a_pipe_that_is_not_full_is_reported_with_its_bubble(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kenotron"):
        warn_of("pp=2 accum=8")
        assert not caplog.records
        warn_of("pp=2 accum=2")
        warn_of("pp=2 engine=zbv_zero_bubble recompute=true accum=8")
    few, whole = [record.getMessage() for record in caplog.records]
    assert "batch_accumulation_per_replica: 2 micro-batches do not fill 2 pipeline ranks" in few
    assert "about 33% of a step" in few
    assert "parallelism.recompute_layer: with it the backward pass of pp_engine zbv_zero_bubble is not split" in whole
