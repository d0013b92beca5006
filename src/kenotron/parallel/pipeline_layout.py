"""Compute which rank holds which layers of a pipeline, and how long ranks idle in a step, without communication.

Eight layers on two ranks with two stages each: `loop` engines assign the stages round-robin; `V` engines fold the
model, so that both ends are on rank 0 and the fold needs no message:

    stage     0      1      2      3             loop   rank 0: stages 0 and 2      V   rank 0: stages 0 and 3
    layers  0 1 2  3 4 5   6 7   head                   rank 1: stages 1 and 3          rank 1: stages 1 and 2

Layers are distributed by cost, and the head counts with its own cost.
"""

from collections.abc import Sequence
from itertools import accumulate

from kenotron.config.model import Model
from kenotron.config.parallelism import V_ENGINES, Parallelism
from kenotron.models.part import ModelPart
from kenotron.parallel.mesh import Mesh


def parts_here(model: Model, layout: Parallelism, mesh: Mesh, length: int) -> list[ModelPart]:
    """Return the parts that this rank holds, in the order of the model; see `parts`."""
    every = parts(model, layout, length)
    numbers = stage_numbers(layout.pp_engine, layout.pp, layout.stages_per_rank, mesh.rank("pp"))
    return [every[number] for number in numbers]


def parts(model: Model, layout: Parallelism, length: int) -> list[ModelPart]:
    """Return all stages of the model in order, by `parallelism.pp_layers` or by cost for sequences of `length`."""
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
    """Return the stages of `rank`, ascending: (rank, 2 pp - 1 - rank) for a V engine, else rank, rank + pp, …"""
    if engine in V_ENGINES:
        return rank, 2 * pp - 1 - rank
    return tuple(rank + turn * pp for turn in range(per_rank))


def rank_of_stage(engine: str, pp: int, stage: int) -> int:
    """Return the rank that holds `stage`."""
    if engine in V_ENGINES:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def split_layers(costs: Sequence[float], stages: int, last: float = 0.0) -> list[int]:
    """Return how many consecutive layers (at least one) each stage gets, minimizing the cost of the costliest stage.

    `costs` are the layers'; `last` is the cost of everything after them on the last stage. Among splits with an equal
    maximum, choose the most even one (least sum of squares).

    >>> split_layers([1, 1, 1, 1, 1, 1], 2, last=2)
    [4, 2]
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages")
    sums = list(accumulate(costs, initial=0.0))

    def cost(stage: int, begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (last if stage == stages - 1 else 0.0)

    # best[end]: (costliest stage, sum of squares, counts) for the layers before `end` on the stages so far
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
    """Return the FLOPs of one token's forward pass: of every layer, and of everything after them (norm, head, loss).

    An embedding lookup costs none. With recomputation a layer runs forward twice, but the head does not.
    """
    from kenotron.models import flops_per_token, skeleton
    from kenotron.models.plan import modules
    from kenotron.models.recomputation import flops_again

    built = skeleton(model)
    blocks = [block for _, block in modules(built, built.plan.blocks)]
    layers = [flops_per_token(block, length, causal=True) for block in blocks]
    head = flops_per_token(built, length, causal=True) - sum(layers)
    again = [flops_again(block, built.config, layout.recompute_layer, length, causal=True) for block in blocks]
    return [layer + more / 3 for layer, more in zip(layers, again)], head


def bubble(engine: str, pp: int, micro_batches: int, stages_per_rank: int = 1, split: bool = True) -> float:
    """Return the share of a step in which a rank is idle, between 0 and 1.

    It assumes equal stages, a backward pass twice as long as forward (with equal halves for inputs and for weights),
    and messages that take no time. In units of a stage's forward pass, a rank works ``3 stages micro_batches`` and
    idles, if there are enough micro-batches,

        afab, 1f1b, interleaved_1f1b                             3 (pp - 1)     Huang et al. 2019, arXiv 1811.06965;
                                                                                Narayanan et al. 2021, arXiv 2104.04473
        interleaved_zero_bubble, zbv_zero_bubble, dualpipev          pp - 1     Qi et al. 2023, arXiv 2401.10241;
                                                                                DeepSeek-AI 2024, arXiv 2412.19437

    The values for fewer micro-batches, and for a backward pass that is not `split` into halves (recomputation,
    compilation), come from simulating torch's schedules, which the tests repeat.
    """
    idle = _idle(engine, pp, micro_batches, stages_per_rank, split)
    return idle / (3 * stages_per_rank * micro_batches + idle)


def _idle(engine: str, pp: int, micro_batches: int, v: int, split: bool) -> int:
    """Return a rank's idle time in units of a stage's forward pass."""
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
