"""The memory of a layout's ranks, predicted by building them and doing two steps on fake ranks.

    plan_memory(config, GPUS["h100"])
    [RankMemory(rank=0, stage=0, peak=Peak(bytes=…, of={"weights": …}, largest=[…]), between_steps=…), …]

Ranks of one pipeline stage hold the same shapes, or less where something does not divide; the first of each stage is
followed. Only as many micro-batches are done as it takes until a rank holds the most.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kenotron.config.errors import InputError, RunFailed
from kenotron.kernels.attentions.choice import Facts, attention_of_run
from kenotron.kernels.fused import use_kernels
from kenotron.models import named_parameters
from kenotron.planner import stand_in
from kenotron.planner.ledger import Ledger, Peak
from kenotron.planner.rehearsal import batch_of, build_on, micro_batches_to_follow, on_fake_rank, routing_in_balance
from kenotron.storage.hub import first_line
from kenotron.training.hooks import Hook
from kenotron.training.step import train_step

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu
    from kenotron.training.run import Run


class RankMemory(NamedTuple):
    """What a rank holds at its peak within a step, and in bytes between two steps."""

    rank: int
    stage: int
    peak: Peak
    between_steps: int


def plan_memory(
    config: Config, gpu: Gpu | None, ranks: Sequence[int] | None = None, report: Callable[..., None] | None = None
) -> list[RankMemory]:
    """The memory of `ranks` on `gpu` (None: on CPUs); by default of the first rank of every pipeline stage.

    Each rank is followed in a process of its own, as many at once as there are cores: torch and modules keep tables of
    a rank. `report` is told how many are done, and of how many. Raises InputError as a run on that device would, and
    RunFailed for a model that does not run without values.
    """
    ranks = first_ranks(config) if ranks is None else ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    plans = []
    with context.Pool(min(len(ranks), os.cpu_count() or 1), maxtasksperchild=1) as pool:
        for each in pool.imap(partial(_followed, config, gpu), ranks):
            plans.append(each)
            if report is not None:
                report(len(plans), len(ranks))
    return plans


def first_ranks(config: Config) -> list[int]:
    """The first rank of every pipeline stage, along which ranks are numbered last."""
    layout = config.parallelism
    return [stage * layout.world_size // layout.pp for stage in range(layout.pp)]


def _followed(config: Config, gpu: Gpu | None, rank: int) -> RankMemory:
    try:
        return follow_rank(config, gpu, rank)
    except InputError:
        raise
    except Exception as error:  # which may not survive the way to the other process
        raise RunFailed(f"rank {rank} could not be planned: {type(error).__name__}: {first_line(error)}") from None


def follow_rank(config: Config, gpu: Gpu | None, rank: int) -> RankMemory:
    """Build and step one rank, once in a process. Blocks are not compiled: compiled ones hold somewhat less."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})
    device = torch.device("cpu") if gpu is None else stand_in.install()
    kernels = config.model.kernels
    if gpu is not None and gpu.vendor == "nvidia":
        kernels = kernels or "triton"
    torch.set_num_threads(1)
    with (
        on_fake_rank(config, rank, device) as mesh,
        routing_in_balance(),
        nullcontext() if gpu is None else stand_in.kernels_of_a_gpu(Facts(gpu.vendor, gpu.capability)),
        use_kernels(kernels),
        Ledger() as ledger,
    ):
        attention, _ = attention_of_run(config, device)
        run = build_on(config, mesh, device, attention, [naming := Naming(ledger)])
        peak = follow_steps(run, ledger, naming)
        return RankMemory(rank, mesh.rank("pp"), peak, ledger.bytes)


def follow_steps(run: Run, ledger: Ledger, naming: Naming) -> Peak:
    """The peak of the second of two steps; in the first the optimizer makes its state."""
    naming.name_weights(run)
    count = micro_batches_to_follow(run.config)
    for batches in (1 if run.pipeline is None else count, count):
        begun = ledger.clock
        train_step(run, [batch_of(run.config)] * batches)
        run.step += 1
        states = chain.from_iterable(state.values() for state in run.optimizer.state.values())
        ledger.name("optimizer", (each for each in states if isinstance(each, Tensor)))
    return ledger.peak(since=begun)


class Naming(Hook):
    """Tells the ledger which storages are weights, buffers and gradients."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def name_weights(self, run: Run) -> None:
        """Name what the model consists of."""
        for part in run.parts:
            self.ledger.name("weights", part.parameters())
            self.ledger.name("buffers", part.buffers())
            for parameter in filter(lambda each: each.requires_grad, part.parameters()):
                parameter.register_post_accumulate_grad_hook(self.name_gradient)

    def name_gradient(self, parameter: Tensor) -> None:
        """Name a gradient as soon as it is there: buckets may take its place."""
        self.ledger.name("gradients", [parameter.grad])

    def before_update(self, run: Run) -> None:
        for _, parameter in named_parameters(*run.parts):
            self.name_gradient(parameter)
