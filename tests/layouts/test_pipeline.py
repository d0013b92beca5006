"""A pipeline means what one process means: every schedule, tied or not, whatever is combined with it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kenotron as kn
from kenotron.config import Config
from kenotron.config.parallelism import PP_ENGINES, V_ENGINES, ZERO_BUBBLE_ENGINES
from kenotron.kernels.attention import attention
from kenotron.models import Context, MicroBatch, named_parameters
from kenotron.models.blocks.pre_norm import PreNormBlock
from kenotron.models.decoder import Decoder
from kenotron.optim.build import build_optimizer
from kenotron.optim.clip import clip_gradients
from kenotron.parallel import data
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.parallel.pipeline_layout import parts, stage_numbers
from kenotron.parallel.shards import shard_of
from kenotron.planner.ledger import Ledger
from kenotron.training.initial_weights import fill_weights
from kenotron.training.model_parts import build_parts
from support.layout_runs import SHORT
from support.ranks import ROUNDING, relative_error, run_ranks
from support.tiny_run import tiny_dict

CPU = torch.device("cpu")
SEQUENCES, LENGTH, VOCAB = 16, 16, 61
WITH_DATA = "dp=2 zero=2"
WITH_TENSOR = "tp=2 mode=REDUCE_SCATTER"

Gradients = dict[str, torch.Tensor]
Step = tuple[torch.Tensor, Gradients]  # (loss, z-loss) of a step
Pieces = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]  # name → whole shape, offset, block


def config_of(layout: str, **model: Any) -> Config:
    """A tied model on `layout`, in four micro-batches and two stages unless it says otherwise."""
    plain = tiny_dict(Path("nowhere"))
    plain["model"]["model_config"] |= {"hidden_size": 32, "num_hidden_layers": 8, "vocab_size": VOCAB}
    plain["model"]["model_config"] |= {"z_loss_enabled": True, "z_loss_coefficient": 0.01}
    plain["model"]["model_config"] |= {"tie_word_embeddings": True} | model
    plain["model"]["init_method"]["std"] = 0.1
    plain["optimizer"]["zero_stage"] = None
    given = {"pp": "2", "accum": "4"} | dict(part.split("=") for part in layout.split())
    return kn.load(plain, [f"{SHORT.get(name, name)}={value}" for name, value in given.items()])


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


def alone(config: Config, count: int = 1) -> Step:
    """That of one process."""
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


def assemble(results: Sequence[tuple[torch.Tensor, Pieces]]) -> Step:
    """What the ranks returned, as one: losses added up, every gradient put together from its blocks."""
    whole: Gradients = {}
    for _, pieces in results:
        for name, (shape, offset, block) in pieces.items():
            target = whole.setdefault(name, torch.full(shape, float("nan")))
            for dim, (begin, size) in enumerate(zip(offset, block.shape)):
                target = target.narrow(dim, begin, size)
            target.copy_(block)
    return torch.stack([total for total, _ in results]).sum(0), whole


def same(found: Step, expected: Step, within: float = ROUNDING) -> None:
    assert relative_error(found[0], expected[0]) < within
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert relative_error(found[1][name][: len(gradient)], gradient) < within, name  # without padding for tp


def check(layout: str, count: int = 4, tied: bool = True, within: float = ROUNDING) -> None:
    """Loss and every gradient of a layout are one process's."""
    config = config_of(f"accum={count} {layout}", tie_word_embeddings=tied)
    found = assemble(run_ranks(config.parallelism.world_size, one_step, config, count))
    same(found, alone(config, 1 if within < 1e-5 else count), within)


# ---- gradients ----


@pytest.mark.cases(8)
@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_every_schedule_has_one_process_gradients(engine: str, tied: bool, count: int) -> None:
    check(f"engine={engine}", count, tied)


@pytest.mark.cases(3)
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_four_ranks_pass_on_what_they_have_to(engine: str) -> None:
    check(f"pp=4 engine={engine}", 8)


def recomputed_step(rank: int, config: Config) -> tuple[int, tuple[torch.Tensor, Pieces]]:
    """How often a block of this rank computed forward in a step, and the step."""
    calls, forward = [], PreNormBlock.forward

    def counted(self: PreNormBlock, *args: Any) -> torch.Tensor:
        calls.append(self)
        return forward(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreNormBlock, "forward", counted)
        found = one_step(rank, config, 4)
    return len(calls), found


@pytest.mark.parametrize(
    ("engine", "replicas"), [*((engine, "") for engine in PP_ENGINES), ("zbv_zero_bubble", WITH_DATA)]
)
def test_recomputation_computes_every_block_twice_and_changes_no_gradient(engine: str, replicas: str) -> None:
    config = config_of(f"engine={engine} recompute=true {replicas}")
    results = run_ranks(config.parallelism.world_size, recomputed_step, config)
    assert sum(calls for calls, _ in results) == len(results) // 2 * 8 * 4 * 2  # layers, micro-batches, twice
    same(assemble([step for _, step in results]), alone(config))


@pytest.mark.cases(3)
@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_pipelines_of_two_replicas_sum_their_gradients(engine: str, zero_stage: int) -> None:
    if zero_stage == 3 and engine in ZERO_BUBBLE_ENGINES:
        pytest.skip("refused")
    check(f"engine={engine} dp=2 zero={zero_stage}")


def test_bf16_gradients_differ_only_by_the_order_of_sums() -> None:
    check("engine=dualpipev model.dtype=bfloat16", within=1e-4)


def compiled_step(rank: int, config: Config, count: int) -> tuple[torch.Tensor, Pieces]:
    """Without the compiler's code generator, which knows nothing of pipelines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        return one_step(rank, config, count)


@pytest.mark.slow
@pytest.mark.parametrize("engine", PP_ENGINES)
def test_compiled_blocks_have_the_same_gradients(engine: str) -> None:
    plain, compiled = (config_of(f"engine={engine} compile={each}", num_hidden_layers=4) for each in ("false", "true"))
    same(assemble(run_ranks(2, compiled_step, compiled, 4)), alone(plain))


def count_layers(rank: int, config: Config) -> list[int]:
    """Layers of each of this rank's parts."""
    return [len(part.model.layers) for part in Rank(config).parts]


def test_layers_go_where_the_config_says() -> None:
    layout = "parallelism.pp_layers=[1,7]"
    assert run_ranks(2, count_layers, config_of(layout)) == [[1], [7]]
    check(layout)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_rank_has_as_many_stages_as_the_config_says(stages: int) -> None:
    layout = f"engine=interleaved_1f1b parallelism.pp_stages_per_rank={stages}"
    counts = run_ranks(2, count_layers, config_of(layout))
    assert [len(layers) for layers in counts] == [stages, stages]
    assert sum(map(sum, counts)) == 8
    check(layout)


def steps_of_other_shapes(rank: int, config: Config, counts: Sequence[int]) -> list[tuple[torch.Tensor, Pieces]]:
    here, results = Rank(config), []
    for count in counts:
        results.append((here.step(count), here.gradients()))
        for _, parameter in named_parameters(*here.parts):  # as the optimizer: it does not know the copy
            parameter.grad = None
    return results


@pytest.mark.parametrize("engine", ["1f1b", "zbv_zero_bubble"])
def test_a_step_of_another_shape_is_as_right_as_the_first(engine: str) -> None:
    config = config_of(f"engine={engine}")
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
    held = dict(pair for part in here.parts for pair in part.named_parameters())
    tied = held.keys() & {"model.embed_tokens.weight", "lm_head.weight"}
    return {name: shard_of(held[name]).tensor.detach().clone() for name in tied}


@pytest.mark.cases(2)
@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("engine", ["1f1b", "zbv_zero_bubble"])
def test_owner_and_copy_of_a_tied_weight_stay_bit_equal(engine: str, zero_stage: int) -> None:
    config = config_of(f"engine={engine} dp=2 zero={zero_stage}")
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


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("engine", "more"),
    [
        *((engine, "") for engine in PP_ENGINES),
        *(("1f1b", WITH_DATA), ("dualpipev", WITH_DATA), ("1f1b", WITH_TENSOR), ("zbv_zero_bubble", WITH_TENSOR)),
    ],
)
def test_a_forward_pass_without_backward_is_one_process(engine: str, more: str) -> None:
    config = config_of(f"engine={engine} {more}")
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

    config = config_of(f"pp=4 engine={engine} accum=8")
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
    names = [name for name, _ in named_parameters(*here.parts)]
    return names, sum(parameter.numel() * 4 for part in here.parts for parameter in part.parameters())


def test_no_rank_holds_more_than_its_stages() -> None:
    config = config_of("")
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
    config = config_of(f"engine={engine} accum=8", num_hidden_layers=4)
    hidden = SEQUENCES // 8 * LENGTH * 32 * 4
    for few, many in run_ranks(2, peaks, config, (8, 16)):
        assert many - few < 3 * hidden  # of 8 more: they have labels and losses
