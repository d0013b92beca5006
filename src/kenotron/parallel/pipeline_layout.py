"""Who holds which layers of a pipeline, and how much of a step its ranks will idle: arithmetic, no communication.

Eight layers on two ranks with two stages each. `loop` engines deal the stages out in turn; `V` engines fold the
model, so that its two ends meet on rank 0 and the fold needs no message:

    stage     0      1      2      3             loop   rank 0: stages 0 and 2      V   rank 0: stages 0 and 3
    layers  0 1 2  3 4 5   6 7   head                   rank 1: stages 1 and 3          rank 1: stages 1 and 2

Layers are dealt out by cost, the head counted like the layers that it costs as much as.
"""

from collections.abc import Sequence
from itertools import accumulate

from kenotron.config.model import Model
from kenotron.config.parallelism import V_ENGINES, Parallelism
from kenotron.models.part import ModelPart
from kenotron.parallel.mesh import Mesh


def parts_here(model: Model, layout: Parallelism, mesh: Mesh, length: int) -> list[ModelPart]:
    """The parts that this rank holds, in the order of the model; see `parts`."""
    every = parts(model, layout, length)
    numbers = stage_numbers(layout.pp_engine, layout.pp, layout.stages_per_rank, mesh.rank("pp"))
    return [every[number] for number in numbers]


def parts(model: Model, layout: Parallelism, length: int) -> list[ModelPart]:
    """All stages of the model in order, by `parallelism.pp_layers` or by cost for sequences of `length` tokens."""
    stages = layout.pp * layout.stages_per_rank
    layers = layout.pp_layers
    if layers is None:
        costs, head = layer_costs(model, layout, length)
        layers = split_layers(costs, stages, last=head)
    ends = list(accumulate(layers, initial=0))
    return [
        ModelPart(tuple(range(ends[stage], ends[stage + 1])), first=stage == 0, last=stage == stages - 1)
        for stage in range(stages)
    ]


def stage_numbers(engine: str, pp: int, per_rank: int, rank: int) -> tuple[int, ...]:
    """The stages of `rank`, ascending: (rank, 2 pp - 1 - rank) with a V engine, else rank, rank + pp, …"""
    if engine in V_ENGINES:
        return rank, 2 * pp - 1 - rank
    return tuple(rank + turn * pp for turn in range(per_rank))


def rank_of_stage(engine: str, pp: int, stage: int) -> int:
    """The rank that holds `stage`."""
    if engine in V_ENGINES:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def split_layers(costs: Sequence[float], stages: int, last: float = 0.0) -> list[int]:
    """How many consecutive layers each stage gets, at least one: the dearest stage as cheap as it can be.

    `costs` of the layers, `last` of what comes after them on the last stage. Among splits with the same dearest stage
    the evenest one (least sum of squares), so that no stage but the dearest waits for nothing.

    >>> split_layers([1, 1, 1, 1, 1, 1], 2, last=2)
    [4, 2]
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages")
    sums = list(accumulate(costs, initial=0.0))

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (last if stage == stages - 1 else 0.0)

    # best[end]: (dearest stage, sum of squares, counts) of the layers before `end` on the stages so far
    best = {0: (0.0, 0.0, [])}  # type: dict[int, tuple[float, float, list[int]]]
    for stage in range(stages):
        remaining = stages - 1 - stage
        reached: dict[int, tuple[float, float, list[int]]] = {}
        for begin, (dearest, squares, counts) in best.items():
            for end in range(begin + 1, len(costs) - remaining + 1):
                here = cost(stage, begin, end)
                found = max(dearest, here), squares + here * here, [*counts, end - begin]
                if end not in reached or found[:2] < reached[end][:2]:
                    reached[end] = found
        best = reached
    return best[len(costs)][2]


def layer_costs(model: Model, layout: Parallelism, length: int) -> tuple[list[float], float]:
    """FLOPs of one token's forward pass: of every layer, and of what follows them (norm, head and loss).

    A lookup in the embedding costs none. With recomputation a layer runs forward twice, the head does not.
    """
    import torch

    from kenotron.models import build, flops_per_token
    from kenotron.models.plan import modules
    from kenotron.models.recomputation import flops_again

    with torch.device("meta"):
        built = build(model)
    blocks = [block for _, block in modules(built, built.plan.blocks)]
    layers = [flops_per_token(block, length, causal=True) for block in blocks]
    head = flops_per_token(built, length, causal=True) - sum(layers)
    again = [flops_again(block, built.config, layout.recompute_layer, length, causal=True) for block in blocks]
    return [layer + more / 3 for layer, more in zip(layers, again)], head


def bubble(engine: str, pp: int, micro_batches: int, stages_per_rank: int = 1, split: bool = True) -> float:
    """The share of a step that a rank waits, between 0 and 1.

    Of equal stages, with a backward pass twice as long as the forward one (its halves, for inputs and for weights,
    alike) and messages that take no time. In forward passes of one stage a rank works ``3 stages micro_batches`` and
    waits, once there are enough micro-batches,

        afab, 1f1b, interleaved_1f1b                             3 (pp - 1)     Huang et al. 2019, arXiv 1811.06965;
                                                                                Narayanan et al. 2021, arXiv 2104.04473
        interleaved_zero_bubble, zbv_zero_bubble, dualpipev          pp - 1     Qi et al. 2023, arXiv 2401.10241;
                                                                                DeepSeek-AI 2024, arXiv 2412.19437

    What torch's orders lose with fewer, and where the backward pass is not `split` in its halves (recomputation,
    compilation), was found by playing them through, as the tests do again.
    """
    idle = _idle(engine, pp, micro_batches, stages_per_rank, split)
    return idle / (3 * stages_per_rank * micro_batches + idle)


def _idle(engine: str, pp: int, micro_batches: int, v: int, split: bool) -> int:
    """Forward passes of one stage that fit in a rank's waiting."""
    short = max(0, pp - micro_batches)
    if engine in ("afab", "1f1b"):
        return 3 * (pp - 1)
    if engine == "interleaved_1f1b" or (engine == "interleaved_zero_bubble" and not split):
        return 3 * (pp - 1) + 3 * (v - 1) * short
    if engine == "interleaved_zero_bubble":
        return pp - 1 + v * short + (v - 1) * max(0, pp - 2 * micro_batches)
    if engine == "zbv_zero_bubble":
        return pp - 1 + max(0, 3 * pp - 1 - 2 * micro_batches) if split else 4 * (pp - 1) + 2 * short
    return pp - 1 if split else 4 * pp - 5
