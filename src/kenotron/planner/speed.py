"""How fast a planned run is, and what it takes in days, GPU-hours and energy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kenotron.models import build
from kenotron.planner.timeline import Spent, play
from kenotron.training.metrics import FlopsPerToken, scored_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu
    from kenotron.planner.memory import RankPlan


class Speed(NamedTuple):
    """Of a step on the longest sequences, in seconds; `ranks` say what they spend them on, one of each stage.

    `of_a_gpu`: its share of the tokens per second.
    `mfu`: the model's FLOPs, attention counted whole, as a share of the GPU's peak. `gpu_hours` and `kwh` are those of
    all `train_steps`; GPUs are taken to draw all that they may.
    """

    seconds: float
    tokens_per_second: float
    of_a_gpu: float
    mfu: float
    gpu_hours: float
    kwh: float
    ranks: list[Spent]


def speed_of(config: Config, gpu: Gpu, plans: Sequence[RankPlan]) -> Speed:
    """The speed of the config's run, by the plans of one rank of every stage."""
    tokens, ranks = config.tokens, config.parallelism.world_size
    spent = play([plan.events for plan in plans], gpu, tokens.batch_accumulation_per_replica)
    seconds, length = spent[0].seconds, max(config.sequence_lengths.values())
    per_second = config.global_batch_size * length / seconds
    with torch.device("meta"):
        flops = FlopsPerToken.of(build(config.model), length, False, scored_tokens(config, length)).flops
    hours = ranks * seconds * tokens.train_steps / 3600
    mfu = flops * per_second / (ranks * gpu.flops)
    return Speed(seconds, per_second, per_second / ranks, mfu, hours, hours * gpu.watts / 1000, spent)
