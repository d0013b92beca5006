"""What the planner predicts and what real ranks then hold, counted by the same ledger and by torch's allocator.

predict("llama|dp=2 zero=1|model.dtype=bfloat16")                # [(peak of a step, between steps), …] by rank
run_ranks(2, measure, "llama|dp=2 zero=1|model.dtype=bfloat16")  # the same
run_ranks(2, allocated, "llama|dp=2 zero=1|model.dtype=bfloat16")  # [peak of a step, …]
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from kenotron.config import Config
from kenotron.kernels.attentions.choice import attention_of_run
from kenotron.kernels.random import normal_at
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.planner.ledger import Ledger
from kenotron.planner.memory import Naming, follow_steps, plan_memory
from kenotron.planner.rehearsal import batch_of, build_on
from kenotron.training.initial_weights import fill_weights
from kenotron.training.run import Run
from kenotron.training.step import train_step
from support.layout_runs import problem_of_family

SHAPES = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 509}  # large beside numbers that a step counts


def config_of(case: str) -> Config:
    """The config of ``family|layout|override|…``."""
    family, layout, *overrides = case.split("|")
    problem = problem_of_family(family, "tokens.sequence_length=32", *overrides)
    shapes = {key: value for key, value in SHAPES.items() if key not in problem.absent}
    return replace(problem, model=problem.model | shapes).config(layout, Path("never-written"))


@contextmanager
def followed(case: str) -> Iterator[tuple[Run, Ledger, Naming]]:
    """This rank's run, with weights, whose storages are followed within."""
    config, device = config_of(case), torch.device("cpu")
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    normal_at(0, torch.zeros(1, dtype=torch.int64))  # the table for initial weights, 0.2 MB, is not predicted
    with Ledger() as ledger:
        attention, _ = attention_of_run(config, device)
        run = build_on(config, mesh, device, attention)
        naming = Naming(ledger, run)
        fill_weights(run.parts, config.model.init_method, config.general.seed)
        yield run, ledger, naming


def measure(rank: int, case: str) -> tuple[int, int]:
    """The peak of a step on this rank, whose tensors are real, and the bytes between two steps."""
    with followed(case) as (run, ledger, naming):
        # The least of some steps: gloo's threads hold what they sent a moment longer at times.
        return min(follow_steps(run, ledger, naming).bytes for _ in range(3)), ledger.bytes


class Patient(TorchDispatchMode):
    """Within, a collective has a moment to end before the next operator.

    Torch reports no release by gloo's threads: they let go of what they have sent before this one does.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if "c10d" in function.namespace:
            time.sleep(0.003)
        return out


def allocated(rank: int, case: str, repeats: int = 1) -> int:
    """The peak of a step on this rank by the reports of torch's allocator, the least of `repeats`.

    Torch reports no release of what was allocated before: a step before each is reported, too.
    """
    with followed(case) as (run, ledger, naming):
        follow_steps(run, ledger, naming)
    peaks = []
    for _ in range(repeats):
        with profile(use_cpu=True, profile_memory=True) as reports, Patient():
            for _ in range(2):
                begun = time.time_ns()
                train_step(run, [batch_of(run.config)] * run.config.tokens.batch_accumulation_per_replica)
                run.step += 1
        of_last = [each for each in reports.kineto_results.events() if each.start_ns() >= begun]
        changes = sorted((each.start_ns(), each.nbytes()) for each in of_last if each.name() == "[memory]")
        peaks.append(ledger.bytes + max(accumulate(size for _, size in changes)))
    return min(peaks)


def predict(case: str, ranks: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """The same two numbers of `ranks` (None: of all), predicted."""
    config = config_of(case)
    plans = plan_memory(config, None, range(config.parallelism.world_size) if ranks is None else ranks)
    return [(plan.peak.bytes, plan.between_steps) for plan in plans]
