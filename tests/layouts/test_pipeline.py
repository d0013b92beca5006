"""A pipeline means what one process means: every schedule, tied or not, whatever is combined with it."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

import kenotron as kn
from kenotron.config import Config
from kenotron.config.errors import InputError
from kenotron.config.parallelism import PP_ENGINES, V_ENGINES, ZERO_BUBBLE_ENGINES
from kenotron.kernels.attention import attention
from kenotron.models import Context, MicroBatch, named_parameters
from kenotron.models.blocks.pre_norm import PreNormBlock
from kenotron.models.decoder import Decoder
from kenotron.optim.build import build_optimizer
from kenotron.optim.clip import clip_gradients
from kenotron.parallel import data, pipeline
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.parallel.pipeline_layout import bubble, parts, split_layers, stage_numbers
from kenotron.parallel.shards import shard_of
from kenotron.planner.ledger import Ledger
from kenotron.training.initial_weights import fill_weights
from kenotron.training.model_parts import build_parts
from support.ranks import ROUNDING, relative_error, run_ranks
from support.tiny_run import tiny_dict

CPU = torch.device("cpu")
SEQUENCES, LENGTH, VOCAB = 16, 16, 61

Gradients = dict[str, torch.Tensor]
Pieces = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]  # name → whole shape, offset, block


def config_of(*overrides: str, **model: Any) -> Config:
    plain = tiny_dict(Path("nowhere"))
    plain["model"]["model_config"] |= {
        "hidden_size": 32,
        "num_hidden_layers": 8,
        "vocab_size": VOCAB,
        "z_loss_enabled": True,
        "z_loss_coefficient": 0.01,
    } | model
    plain["model"]["init_method"]["std"] = 0.1
    plain["optimizer"]["zero_stage"] = None
    return kn.load(plain, overrides)


def micro_batches(count: int, dp_rank: int = 0, dp: int = 1) -> list[MicroBatch]:
    """This replica's share of the one global batch: documents of other lengths everywhere, some labels unread."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    real = int((labels != -100).sum())
    size = SEQUENCES // (dp * count)
    begin = dp_rank * size * count
    return [
        _micro_batch(tokens, labels, range(begin + number * size, begin + (number + 1) * size), real)
        for number in range(count)
    ]


def _micro_batch(tokens: torch.Tensor, labels: torch.Tensor, rows: range, real: int) -> MicroBatch:
    borders = [0]
    for place, row in enumerate(rows):
        borders += [place * LENGTH + 3 + row % 7, (place + 1) * LENGTH]
    starts = torch.tensor(borders[:-1])
    flat = torch.arange(len(rows) * LENGTH)
    positions = flat - starts[torch.searchsorted(starts, flat, right=True) - 1]
    ctx = Context((len(rows), LENGTH), positions, attention, cu_seqlens=tuple(borders), loss_scale=1 / real)
    here = slice(rows.start, rows.stop)
    return MicroBatch(tokens[here, :-1].reshape(-1), labels[here].reshape(-1), ctx)


def one_process(config: Config) -> Decoder:
    """The whole model here, its weights those of every layout."""
    whole = {"parallelism": config.parallelism.model_copy(update={"pp": 1, "dp": 1, "tp": 1})}
    config = config.model_copy(update=whole)
    (model,), _ = build_parts(config, build_mesh({}, 1, "cpu"), CPU)
    fill_weights([model], config.model.init_method, config.general.seed)
    return model


def alone(config: Config, count: int = 1) -> tuple[torch.Tensor, Gradients]:
    """(loss, z) and gradients of one process."""
    model = one_process(config)
    total = torch.zeros(2)
    for micro_batch in micro_batches(count):
        loss, z_loss = model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)
        loss.backward()
        total += torch.stack((loss.detach(), z_loss))
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


class Rank:
    """One rank's part of a pipeline, with weights."""

    def __init__(self, config: Config) -> None:
        self.mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
        self.parts, pipeline = build_parts(config, self.mesh, CPU)
        assert pipeline is not None
        self.pipeline = pipeline
        fill_weights(self.parts, config.model.init_method, config.general.seed)
        pipeline.share_tied_weights()

    def step(self, count: int) -> torch.Tensor:
        """Gradients of one step; the loss, once in every tp group."""
        total = self.pipeline.step(micro_batches(count, self.mesh.rank("batch"), self.mesh.degree("batch")))
        for stage in self.pipeline.stages:
            data.finish_gradients(stage)
        self.pipeline.sum_tied_gradients()
        clip_gradients([parameter for _, parameter in named_parameters(*self.parts)], None, self.mesh)  # sums over tp
        return total if self.mesh.rank("tp") == 0 else torch.zeros(2)

    def gradients(self) -> Pieces:
        found: Pieces = {}
        for name, parameter in named_parameters(*self.parts):
            assert parameter.grad is not None, name
            shard = shard_of(parameter.grad)
            found[name] = shard.shape, shard.offset, shard.tensor.clone()
        return found


def one_step(rank: int, config: Config, count: int) -> tuple[torch.Tensor, Pieces]:
    here = Rank(config)
    return here.step(count), here.gradients()


def assemble(results: Sequence[tuple[torch.Tensor, Pieces]]) -> tuple[torch.Tensor, Gradients]:
    """What the ranks returned, as one: losses added up, every gradient put together from its blocks."""
    whole: Gradients = {}
    for _, pieces in results:
        for name, (shape, offset, block) in pieces.items():
            target = whole.setdefault(name, torch.full(shape, float("nan")))
            for dim, (begin, size) in enumerate(zip(offset, block.shape)):
                target = target.narrow(dim, begin, size)
            target.copy_(block)
    return torch.stack([total for total, _ in results]).sum(0), whole


def same(
    found: tuple[torch.Tensor, Gradients], expected: tuple[torch.Tensor, Gradients], within: float = ROUNDING
) -> None:
    assert relative_error(found[0], expected[0]) < within
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert relative_error(found[1][name][: len(gradient)], gradient) < within, name  # without padding for tp


def check(*overrides: str, count: int = 4, tied: bool = True, within: float = ROUNDING) -> None:
    """Loss and every gradient of a layout are one process's."""
    config = config_of(*overrides, f"tokens.batch_accumulation_per_replica={count}", tie_word_embeddings=tied)
    found = assemble(run_ranks(config.parallelism.world_size, one_step, config, count))
    same(found, alone(config, 1 if within < 1e-5 else count), within)


# ---- gradients ----


@pytest.mark.cases(8)
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_every_schedule_has_one_process_gradients(engine: str, tied: bool, count: int) -> None:
    check(f"parallelism.pp_engine={engine}", "parallelism.pp=2", count=count, tied=tied)


@pytest.mark.cases(3)
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_four_ranks_pass_on_what_they_have_to(engine: str) -> None:
    check(f"parallelism.pp_engine={engine}", "parallelism.pp=4", count=8)


@pytest.mark.cases(3)
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_recomputation_changes_no_gradient(engine: str) -> None:
    check(f"parallelism.pp_engine={engine}", "parallelism.pp=2", "parallelism.recompute_layer=true")


def count_blocks(rank: int, config: Config) -> int:
    """How often a block of this rank computed forward in a step."""
    calls, forward = [], PreNormBlock.forward

    def counted(self: PreNormBlock, *args: Any) -> torch.Tensor:
        calls.append(self)
        return forward(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreNormBlock, "forward", counted)
        Rank(config).step(4)
    return len(calls)


@pytest.mark.parametrize("engine", PP_ENGINES)
def test_recomputation_computes_every_block_twice_and_no_more(engine: str) -> None:
    layout = ("parallelism.pp=2", f"parallelism.pp_engine={engine}", "parallelism.recompute_layer=true")
    counts = run_ranks(2, count_blocks, config_of(*layout, "tokens.batch_accumulation_per_replica=4"))
    assert sum(counts) == 8 * 4 * 2  # layers, micro-batches, twice


@pytest.mark.cases(6)
@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_pipelines_of_two_replicas_sum_their_gradients(engine: str, zero_stage: int) -> None:
    if zero_stage == 3 and engine in ZERO_BUBBLE_ENGINES:
        pytest.skip("refused")
    check(
        f"parallelism.pp_engine={engine}", "parallelism.pp=2", "parallelism.dp=2", f"optimizer.zero_stage={zero_stage}"
    )


def test_recomputation_over_shards_with_a_whole_backward_pass() -> None:
    check(
        "parallelism.pp_engine=zbv_zero_bubble",
        "parallelism.pp=2",
        "parallelism.dp=2",
        "optimizer.zero_stage=2",
        "parallelism.recompute_layer=true",
    )


@pytest.mark.cases(3)
@pytest.mark.parametrize("mode", ["ALL_REDUCE", "REDUCE_SCATTER"])
@pytest.mark.parametrize("engine", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_stages_are_split_over_tp_too(engine: str, mode: str) -> None:
    check(f"parallelism.pp_engine={engine}", "parallelism.pp=2", "parallelism.tp=2", f"parallelism.tp_mode={mode}")


@pytest.mark.parametrize("engine", ["1f1b", "dualpipev"])
def test_bf16_gradients_differ_only_by_the_order_of_sums(engine: str) -> None:
    check(f"parallelism.pp_engine={engine}", "parallelism.pp=2", "model.dtype=bfloat16", within=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_compiled_blocks_have_the_same_gradients(engine: str) -> None:
    check(f"parallelism.pp_engine={engine}", "parallelism.pp=2", "model.compile=true")


def count_layers(rank: int, config: Config) -> list[int]:
    """Layers of each of this rank's parts."""
    return [len(part.model.layers) for part in Rank(config).parts]


def test_layers_go_where_the_config_says() -> None:
    layout = ("parallelism.pp=2", "parallelism.pp_layers=[1, 7]")
    assert run_ranks(2, count_layers, config_of(*layout)) == [[1], [7]]
    check(*layout)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_rank_has_as_many_stages_as_the_config_says(stages: int) -> None:
    engine = ("parallelism.pp=2", "parallelism.pp_engine=interleaved_1f1b")
    layout = (*engine, f"parallelism.pp_stages_per_rank={stages}")
    counts = run_ranks(2, count_layers, config_of(*layout))
    assert [len(layers) for layers in counts] == [stages, stages]
    assert sum(map(sum, counts)) == 8
    check(*layout)


def steps_of_other_shapes(rank: int, config: Config, counts: Sequence[int]) -> list[tuple[torch.Tensor, Pieces]]:
    here, results = Rank(config), []
    for count in counts:
        results.append((here.step(count), here.gradients()))
        for _, parameter in named_parameters(*here.parts):  # as the optimizer: it does not know the copy
            parameter.grad = None
    return results


@pytest.mark.parametrize("engine", ["1f1b", "zbv_zero_bubble"])
def test_a_step_of_another_shape_is_as_right_as_the_first(engine: str) -> None:
    config = config_of(
        "parallelism.pp=2",
        f"parallelism.pp_engine={engine}",
        "tokens.batch_accumulation_per_replica=4",
        tie_word_embeddings=True,
    )
    expected = alone(config)
    for results in zip(*run_ranks(2, steps_of_other_shapes, config, (4, 8, 4, 4))):
        same(assemble(results), expected)


# ---- tied weights ----


def three_updates(rank: int, config: Config) -> dict[str, torch.Tensor]:
    """Owner and copy after three steps, where they are; the optimizer never sees the copy."""
    here = Rank(config)
    optimizer = build_optimizer(named_parameters(*here.parts), config.optimizer)
    for _ in range(3):
        here.step(4)
        optimizer.step()
        here.pipeline.share_tied_weights()
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for part in here.parts for p in part.parameters()), "it would count in the next step"
    names = ("model.embed_tokens.weight", "lm_head.weight")
    return {
        name: shard_of(parameter).tensor.detach().clone()
        for part in here.parts
        for name, parameter in part.named_parameters()
        if name in names
    }


@pytest.mark.cases(2)
@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("engine", ["1f1b", "zbv_zero_bubble"])
def test_owner_and_copy_of_a_tied_weight_stay_bit_equal(engine: str, zero_stage: int) -> None:
    layout = ("parallelism.pp=2", "parallelism.dp=2", f"parallelism.pp_engine={engine}")
    more = (f"optimizer.zero_stage={zero_stage}", "tokens.batch_accumulation_per_replica=4")
    config = config_of(*layout, *more, tie_word_embeddings=True)
    results = run_ranks(4, three_updates, config)
    start = one_process(config).get_parameter("model.embed_tokens.weight").detach()
    for replica in range(2):
        held = results[replica] | results[2 + replica]  # ranks of one pipeline
        owner, copy = held["model.embed_tokens.weight"], held["lm_head.weight"]
        assert torch.equal(owner, copy)
        half = start if zero_stage == 0 else start.chunk(2)[replica]
        assert relative_error(owner, half) > 1e-3  # it learned


# ---- forward only ----


def forwards(rank: int, config: Config) -> tuple[list[Any], list[Any], tuple[torch.Tensor, Pieces]]:
    """Losses of every micro-batch, logits of the first, and a training step after that."""
    here = Rank(config)
    for part in here.parts:
        part.eval()
    losses = [here.pipeline.forward(micro_batch) for micro_batch in micro_batches(4)]
    first = micro_batches(4)[0]
    unlabelled = MicroBatch(first.tokens, None, first.ctx)  # type: ignore[arg-type]
    logits = [here.pipeline.forward(unlabelled)]
    for stage in here.pipeline.stages:
        stage.train()
        data.reshard_params(stage)
    return losses, logits, (here.step(4), here.gradients())


WITH_DATA = ("parallelism.dp=2", "optimizer.zero_stage=2")
WITH_TENSOR = ("parallelism.tp=2", "parallelism.tp_mode=REDUCE_SCATTER")


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("engine", "more"),
    [
        *((engine, ()) for engine in PP_ENGINES),
        ("1f1b", WITH_DATA),
        ("dualpipev", WITH_DATA),
        ("1f1b", WITH_TENSOR),
        ("zbv_zero_bubble", WITH_TENSOR),
    ],
)
def test_a_forward_pass_without_backward_is_one_process(engine: str, more: Sequence[str]) -> None:
    layout = ("parallelism.pp=2", f"parallelism.pp_engine={engine}", *more)
    config = config_of(*layout, "tokens.batch_accumulation_per_replica=4", tie_word_embeddings=True)
    results = run_ranks(config.parallelism.world_size, forwards, config)
    model = one_process(config)
    per_stage = config.parallelism.world_size // 2
    holder = 0 if engine in V_ENGINES else per_stage
    for place, (losses, logits, _) in enumerate(results):
        if not holder <= place < holder + per_stage:
            assert losses == [None] * 4
            continue
        for (loss, z_loss), micro_batch in zip(losses, micro_batches(4)):
            expected = model(micro_batch.tokens, micro_batch.ctx, micro_batch.labels)
            torch.testing.assert_close((loss, z_loss), expected, rtol=ROUNDING, atol=0)
        first = micro_batches(4)[0]
        torch.testing.assert_close(logits[0], model(first.tokens, first.ctx), rtol=1e-5, atol=1e-6)
    same(assemble([step for _, _, step in results]), alone(config))


# ---- who holds what ----


@pytest.mark.parametrize("engine", PP_ENGINES)
def test_every_layer_is_in_one_stage_and_every_stage_on_the_rank_that_torch_expects(engine: str) -> None:
    from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

    config = config_of("parallelism.pp=4", f"parallelism.pp_engine={engine}", "tokens.batch_accumulation_per_replica=8")
    every = parts(config.model, config.parallelism, LENGTH)
    assert [layer for part in every for layer in part.layers] == list(range(8))
    assert [part.first for part in every] == [True] + [False] * (len(every) - 1)
    assert [part.last for part in every] == [False] * (len(every) - 1) + [True]
    mapping = generate_rank_to_stage_mapping(4, len(every), style="v" if engine in V_ENGINES else "loop")
    for rank, expected in mapping.items():
        assert list(stage_numbers(engine, 4, len(every) // 4, rank)) == sorted(expected)


def held(rank: int, config: Config) -> tuple[list[str], int]:
    """Names of this rank's parameters, and the bytes of every tensor that they keep."""
    here = Rank(config)
    return (
        [name for name, _ in named_parameters(*here.parts)],
        sum(parameter.numel() * 4 for part in here.parts for parameter in part.parameters()),
    )


def test_no_rank_holds_more_than_its_stages() -> None:
    config = config_of("parallelism.pp=2", "tokens.batch_accumulation_per_replica=4", tie_word_embeddings=True)
    (names0, bytes0), (names1, bytes1) = run_ranks(2, held, config)
    _, gradients = alone(config)
    assert sorted(names0 + names1) == sorted(gradients)  # each once: the copy is nobody's parameter
    copy = 4 * VOCAB * 32
    assert bytes0 + bytes1 == sum(gradient.numel() * 4 for gradient in gradients.values()) + copy


def peaks(rank: int, config: Config, counts: Sequence[int]) -> list[int]:
    """The bytes of steps of so many micro-batches, all of one size, at their peaks."""
    found = []
    for count in counts:
        here = Rank(config)
        with Ledger() as ledger:
            here.pipeline.step([micro_batches(8)[0]] * count)
        found.append(ledger.peak().bytes)
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("engine", [engine for engine in PP_ENGINES if engine != "afab"])
def test_more_micro_batches_take_no_more_memory(engine: str) -> None:
    """Torch's stages have buffers for what is received in all of them."""
    layout = "parallelism.pp=2", f"parallelism.pp_engine={engine}", "tokens.batch_accumulation_per_replica=8"
    config = config_of(*layout)
    hidden = SEQUENCES // 8 * LENGTH * 32 * 4
    for few, many in run_ranks(2, peaks, config, (8, 16)):
        assert many - few < 3 * hidden  # of 8 more: they have labels and losses


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


def test_a_head_that_costs_two_layers_takes_their_place() -> None:
    assert split_layers([1.0] * 6, 2, last=2.0) == [4, 2]
    assert split_layers([1.0] * 6, 2) == [3, 3]
    assert split_layers([1.0] * 7, 4, last=1.0) == [2, 2, 2, 1]
    assert split_layers([3.0, 1.0, 1.0, 1.0], 2) == [1, 3]


def test_more_stages_than_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 3 stages"):
        split_layers([1.0, 1.0], 3)


# ---- the bubble and the limits ----


class FakeStage:
    """As much of a stage as torch's schedules ask for before they run."""

    submod = None

    def __init__(self, index: int, stages: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, stages, pp, 0


def order_of(engine: str, pp: int, count: int, per_rank: int) -> dict[int, list[tuple[str, int, int]]]:
    """(kind, stage, micro-batch) of every rank's work in its order, as torch's schedule does it."""
    if engine == "afab" or (engine == "1f1b" and count < pp):
        return {r: [(kind, r, m) for kind in "FB" for m in range(count)] for r in range(pp)}
    if engine == "1f1b":  # what Schedule1F1B does in its loop; its `pipeline_order` is for drawing only
        return {r: list(_one_forward_one_backward(r, pp, count)) for r in range(pp)}
    stages = [FakeStage(turn * pp, pp * per_rank, pp) for turn in range(per_rank)]
    order = pipeline.SCHEDULES[engine](stages, count, loss_fn=lambda output, target: output).pipeline_order
    return {
        rank: [
            (each.computation_type.value, each.stage_index, each.microbatch_index)
            for action in actions
            if action is not None
            for each in (action.sub_actions or (action,))
        ]
        for rank, actions in order.items()
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
    layout = (f"parallelism.pp={pp}", f"parallelism.pp_engine={engine}")
    try:
        config_of(*layout, f"tokens.batch_accumulation_per_replica={count}", num_hidden_layers=32)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("engine", PP_ENGINES)
def test_the_config_refuses_the_numbers_of_micro_batches_that_torch_refuses(engine: str) -> None:
    per_rank = 1 if engine in PP_ENGINES[:2] else 2
    for pp in (2, 3, 4):
        for count in range(1, 14):
            stages = [FakeStage(turn * pp, pp * per_rank, pp) for turn in range(per_rank)]
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
    layout = ("parallelism.pp=2", "parallelism.dp=2", f"parallelism.pp_engine={engine}")
    with pytest.raises(
        InputError, match=rf"optimizer\.zero_stage: {zero_stage} frees gathered weights .* pp_engine {engine}"
    ):
        config_of(*layout, f"optimizer.zero_stage={zero_stage}", "tokens.batch_accumulation_per_replica=4")


def warn_of(config: Config) -> None:
    """As a run of `config` warns."""
    pipeline.warn_of_idle_ranks(config.parallelism, config.tokens.batch_accumulation_per_replica, config.model.compile)


def test_a_pipe_that_is_not_full_is_reported_with_its_bubble(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kenotron"):
        warn_of(config_of("parallelism.pp=2", "tokens.batch_accumulation_per_replica=8"))
        assert not caplog.records
        warn_of(config_of("parallelism.pp=2", "tokens.batch_accumulation_per_replica=2"))
        recomputed = ("parallelism.pp_engine=zbv_zero_bubble", "parallelism.recompute_layer=true")
        warn_of(config_of("parallelism.pp=2", *recomputed, "tokens.batch_accumulation_per_replica=8"))
    few, whole = [record.getMessage() for record in caplog.records]
    assert "batch_accumulation_per_replica: 2 micro-batches do not fill 2 pipeline ranks" in few
    assert "about 33% of a step" in few
    assert "parallelism.recompute_layer: with it the backward pass of pp_engine zbv_zero_bubble is not split" in whole
