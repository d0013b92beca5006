"""What the planner predicts and what real ranks then hold, counted by the same ledger.

predict("llama|dp=2 zero=1|model.dtype=bfloat16")                # [(peak of a step, between steps), …] by rank
run_ranks(2, measure, "llama|dp=2 zero=1|model.dtype=bfloat16")  # the same
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kenotron.config import Config
from kenotron.kernels.attentions.choice import attention_of_run
from kenotron.kernels.random import normal_at
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.planner.ledger import Ledger
from kenotron.planner.memory import Naming, follow_steps, plan_memory
from kenotron.planner.rehearsal import build_on
from kenotron.training.initial_weights import fill_weights
from support.layout_runs import problem_of_family

SHAPES = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 509}  # large beside numbers that a step counts


def config_of(case: str) -> Config:
    """The config of ``family|layout|override|…``."""
    family, layout, *overrides = case.split("|")
    problem = problem_of_family(family, "tokens.sequence_length=32", *overrides)
    shapes = {key: value for key, value in SHAPES.items() if key not in problem.absent}
    return replace(problem, model=problem.model | shapes).config(layout, Path("never-written"))


def measure(rank: int, case: str) -> tuple[int, int]:
    """The peak of a step on this rank, whose tensors are real, and the bytes between two steps."""
    config, device = config_of(case), torch.device("cpu")
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    normal_at(0, torch.zeros(1, dtype=torch.int64))  # the table for initial weights, 0.2 MB, is not predicted
    with Ledger() as ledger:
        attention, _ = attention_of_run(config, device)
        run = build_on(config, mesh, device, attention, [naming := Naming(ledger)])
        fill_weights(run.parts, config.model.init_method, config.general.seed)
        # The least of some steps: gloo's threads hold what they sent a moment longer at times.
        return min(follow_steps(run, ledger, naming).bytes for _ in range(3)), ledger.bytes


def predict(case: str, ranks: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """The same two numbers of `ranks` (None: of all), predicted."""
    config = config_of(case)
    plans = plan_memory(config, None, range(config.parallelism.world_size) if ranks is None else ranks)
    return [(plan.peak.bytes, plan.between_steps) for plan in plans]
