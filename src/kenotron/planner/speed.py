"""The speed of a planned run, and its cost in GPU-hours and energy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kenotron.data.stage_plan import stages_without_sources
from kenotron.models import skeleton
from kenotron.planner.timeline import Spent, play
from kenotron.training.metrics import FlopsPerToken, scored_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu
    from kenotron.planner.memory import RankPlan


class Speed(NamedTuple):
    """The `seconds` of a step on the longest sequences; `ranks` has the times of one rank of each stage.

    `of_a_gpu`: the tokens per second of a GPU. `mfu`: the model's FLOPs, with the whole attention square, as a share of
    the GPU's peak. `tokens` are those of all `train_steps`; they take `gpu_hours`, `kwh` and `cost` at this speed, with
    GPUs at their maximum power.
    """

    seconds: float
    tokens_per_second: float
    of_a_gpu: float
    mfu: float
    tokens: int
    gpu_hours: float
    kwh: float
    cost: float
    ranks: list[Spent]


def speed_of(config: Config, gpu: Gpu, plans: Sequence[RankPlan]) -> Speed:
    """Return the speed of the config's run, from the plans of one rank of every stage."""
    ranks = config.parallelism.world_size
    spent = play([plan.events for plan in plans], gpu, config.tokens.batch_accumulation_per_replica)
    seconds, length = spent[0].seconds, max(config.sequence_lengths.values())
    per_second = config.global_batch_size * length / seconds
    flops = FlopsPerToken.of(skeleton(config.model), length, False, scored_tokens(config, length)).flops
    mfu = flops * per_second / (ranks * gpu.flops)
    tokens = sum(stage.tokens_before(stage.stop) for stage in stages_without_sources(config))
    hours = ranks * tokens / per_second / 3600
    kwh, cost = hours * gpu.watts / 1000, hours * gpu.price
    return Speed(seconds, per_second, per_second / ranks, mfu, tokens, hours, kwh, cost, spent)
