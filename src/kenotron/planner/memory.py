"""The memory of a layout's ranks, predicted by building them and doing two steps on fake ranks.

    plan_memory(config, GPUS["h100"])
    [RankPlan(rank=0, stage=0, peak=Peak(bytes=…, of={"weights": …}, largest=[…]), between_steps=…), …]

Ranks of one pipeline stage hold the same shapes, or less where something does not divide; the first of each stage is
followed. Only as many micro-batches are done as it takes until a rank holds the most.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from kenotron.config.errors import InputError, RunFailed
from kenotron.kernels.attentions.choice import DeviceFacts, attention_of_run
from kenotron.kernels.fused import use_kernels
from kenotron.models import named_parameters
from kenotron.optim.state import state_tensors
from kenotron.planner import stand_in
from kenotron.planner.ledger import Ledger, Peak
from kenotron.planner.rehearsal import (
    batch_of,
    build_on,
    micro_batches_to_follow,
    on_fake_rank,
    routing_in_balance,
    two_blocks,
)
from kenotron.planner.trace import Event, Trace
from kenotron.storage.hub import first_line
from kenotron.training.saved_state import model_tensors, optimizer_tensors
from kenotron.training.step import train_step

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu
    from kenotron.training.run import Run


STARTING = Lock()
"""Held by the thread that starts a process, for which it changes multiprocessing: layouts are searched by several."""


class RankPlan(NamedTuple):
    """What a rank holds at its peak within a step, and in bytes between two steps; what the step asks of a GPU.

    `saved`: name → bytes of every tensor that this rank holds a part of and a checkpoint has, whole.
    """

    rank: int
    stage: int
    peak: Peak
    between_steps: int
    events: list[Event]
    saved: dict[str, int]


def plan_memory(
    config: Config, gpu: Gpu | None, ranks: Sequence[int] | None = None, report: Callable[..., None] | None = None
) -> list[RankPlan]:
    """Return the memory of `ranks` on `gpu` (None: on CPUs); by default of the first rank of every pipeline stage.

    Each rank is followed in a process of its own, as many at once as there are cores: torch and modules keep tables of
    a rank. `report` is told how many are done, and of how many. Raises InputError as a run on that device would, and
    RunFailed for a model that does not run without values.
    """
    ranks = first_ranks(config) if ranks is None else ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # which fake tensors import
    plans = []
    resource_tracker.ensure_running()  # which would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for this process, which ends others
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    with ExitStack() as started, ThreadPool(os.cpu_count()) as pool:
        for each in pool.imap(partial(_in_process, context, started, pickle.dumps((config, gpu))), ranks):
            plans.append(each)
            if report is not None:
                report(len(plans), len(ranks))
    return plans


def first_ranks(config: Config) -> list[int]:
    """Return the first rank of every pipeline stage, along which ranks are numbered last."""
    layout = config.parallelism
    return [stage * layout.world_size // layout.pp for stage in range(layout.pp)]


def _without_main(name: str, everything: Any = spawn.get_preparation_data) -> dict[str, Any]:
    """Tell a new process all but its parent's script, which it would run: `kn.train` in it asks the planner."""
    return {key: value for key, value in everything(name).items() if not key.startswith("init_main")}


def _in_process(context: Any, started: ExitStack, pickled: bytes, rank: int) -> RankPlan:
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_followed, args=(sending, pickled, rank), daemon=True)
    with STARTING, patch.object(spawn, "get_preparation_data", _without_main):
        process.start()
    started.callback(process.kill)
    sending.close()
    answer = None
    with receiving, suppress(EOFError):
        answer = receiving.recv()
    process.join()
    if isinstance(answer, RankPlan):
        return answer
    raise answer or RunFailed(f"rank {rank} could not be planned: exit code {process.exitcode}; out of memory?")


def _followed(sending: Connection, pickled: bytes, rank: int) -> None:
    """Send the plan of a rank, or an error. The process ends with its parent, even in the middle of a plan."""
    Thread(target=_end_with_parent, daemon=True).start()
    try:
        config, gpu = pickle.loads(pickled)
        sending.send(follow_rank(config, gpu, rank))
    except InputError as error:
        sending.send(error)
    except Exception as error:  # which may not survive the way to the other process
        what = f"{type(error).__name__}: {first_line(error)}"
        sending.send(RunFailed(f"rank {rank} could not be planned: {what}"))


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def follow_rank(config: Config, gpu: Gpu | None, rank: int) -> RankPlan:
    """Build and step one rank, once in a process. Blocks are not compiled: compiled ones hold somewhat less."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"compile": False})})
    device = torch.device("cpu") if gpu is None else stand_in.install()
    kernels = config.model.kernels or ("triton" if gpu is not None and gpu.vendor == "nvidia" else None)
    torch.set_num_threads(1)
    world = config.parallelism.world_size
    ranks_on_machine = world if gpu is None else min(world, gpu.in_machine)
    with (
        on_fake_rank(config, rank, device, ranks_on_machine) as mesh,
        routing_in_balance(),
        two_blocks() if gpu is None else stand_in.kernels_of_a_gpu(DeviceFacts(gpu.vendor, gpu.capability)),
        use_kernels(kernels),
        Ledger(device.type) as ledger,
    ):
        attention, _ = attention_of_run(config, device)
        run = build_on(config, mesh, device, attention)
        naming = Naming(ledger, run)
        trace = None if gpu is None else Trace(mesh, ranks_on_machine)
        peak = follow_steps(run, ledger, naming, trace)
        events = [] if trace is None else trace.events
        return RankPlan(rank, mesh.rank("pp"), peak, ledger.bytes, events, saved_by(run))


def saved_by(run: Run) -> dict[str, int]:
    """Name → bytes of every tensor of which `run` saves a part: of all of it, without vocabulary padding."""
    moments = state_tensors(named_parameters(*run.parts), run.optimizer)
    shards = model_tensors(*run.parts) | optimizer_tensors(moments, run.parts)
    return {name: math.prod(shard.shape) * shard.tensor.element_size() for name, shard in shards.items()}


def follow_steps(run: Run, ledger: Ledger, naming: Naming, trace: Trace | None = None) -> Peak:
    """Return the peak of the second of two steps, which `trace` records; in the first the optimizer makes its state."""
    count = micro_batches_to_follow(run.config)
    for batches in (1 if run.pipeline is None else count, count):
        begun = ledger.clock
        with nullcontext() if trace is None or run.step == 0 else naming.beginnings(trace):
            train_step(run, [batch_of(run.config)] * batches)
        run.step += 1
        states = chain.from_iterable(state.values() for state in run.optimizer.state.values())
        ledger.name("optimizer", (each for each in states if isinstance(each, Tensor)))
    return ledger.peak(since=begun)


class Naming:
    """Tells the ledger which storages of `run` are weights, buffers and gradients.

    It is no hook of the run: with one that sees gradients before an update, the host waits for their norm first.
    """

    def __init__(self, ledger: Ledger, run: Run) -> None:
        self.ledger, self.run = ledger, run
        self.trace: Trace | None = None
        for part in run.parts:
            ledger.name("weights", part.parameters())
            ledger.name("buffers", part.buffers())
            for parameter in filter(lambda each: each.requires_grad, part.parameters()):
                parameter.register_post_accumulate_grad_hook(self.name_gradient)
        run.optimizer.register_step_pre_hook(self.before_update)

    def name_gradient(self, parameter: Tensor) -> None:
        """Name a gradient as soon as it is there: buckets may take its place."""
        self.ledger.name("gradients", [parameter.grad])

    @contextmanager
    def beginnings(self, trace: Trace) -> Iterator[None]:
        """Within, tell the `trace` what happens, and which micro-batch or update begins."""
        self.trace = trace
        with self.run.parts[0].register_forward_pre_hook(lambda *_: trace.begin("micro-batch"), prepend=True), trace:
            yield
        self.trace = None

    def before_update(self, *args: object) -> None:
        """Name the gradients that there are now."""
        if self.trace is not None:
            self.trace.begin("update")
        for _, parameter in named_parameters(*self.run.parts):
            self.name_gradient(parameter)
