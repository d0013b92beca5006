"""Whether `kenotron plan` plays a step's traces rightly: planned and measured steps of ranks on this machine's cores.

    python benchmarks/plan_time.py                       # twenty minutes on two quiet cores
    python benchmarks/plan_time.py --only "pp=2;zero"    # layouts whose names contain one of these

What is traced, and how traces are played against one another, is what plans GPUs. What differs are the rates: every
operator of a trace is timed alone with its own shapes, on inputs that no cache holds, on as many cores at once as there
are ranks; and every kind of collective over gloo, between two ranks that do the same work in between: the cores of a
shared machine are never equally fast, so that one rank waits for the other. In a step operators take a little longer,
as Python asks for them: by one factor, measured with a Llama on one rank, or on one a core. Then ranks train on the
same layout, a core each. Of operators and steps the lower quartile counts, as other programs only make them longer; of
collectives, of which a step has many, the median.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.fsdp  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed._functional_collectives import (  # noqa: E402
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
    wait_tensor,
)
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from kenotron.config import Config  # noqa: E402
from kenotron.kernels.attentions.choice import attention_of_run  # noqa: E402
from kenotron.kernels.host_memory import keep_freed_memory  # noqa: E402
from kenotron.parallel.mesh import Mesh, axes, build_mesh  # noqa: E402
from kenotron.planner import timeline  # noqa: E402
from kenotron.planner.ledger import Ledger  # noqa: E402
from kenotron.planner.memory import Naming, first_ranks, follow_steps  # noqa: E402
from kenotron.planner.rehearsal import batch_of, build_on, on_fake_rank, routing_in_balance  # noqa: E402
from kenotron.planner.trace import Event, Operator, Ran, Trace  # noqa: E402
from kenotron.training.initial_weights import fill_weights  # noqa: E402
from kenotron.training.step import train_step  # noqa: E402
from support.layout_runs import problem_of_family  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

SHAPES = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 2048, "num_hidden_layers": 4}
ALONE = "llama|dp=1 accum=2"
LAYOUTS = """
    llama|dp=1 recompute=true accum=2
    llama|dp=1 recompute=selective accum=2
    llama|dp=1 accum=2|model.dtype=bfloat16
    llama|dp=1 accum=2|optimizer.optimizer_factory={name: muon}
    gpt_neox|dp=1 accum=2
    starcoder2|dp=1 accum=2
    qwen3|dp=1 accum=2
    llama|dp=2 zero=0 accum=2
    llama|dp=2 zero=1 accum=2
    llama|dp=2 zero=2 accum=2
    llama|dp=2 zero=3 accum=2
    llama|dp=2 zero=3 recompute=true accum=2
    gpt_neox|dp=2 zero=1 accum=2
    llama|tp=2 accum=2
    llama|tp=2 mode=ALL_REDUCE async=false accum=2
    llama|tp=2 recompute=selective accum=2
    qwen3|tp=2 accum=2
    llama|cp=2 accum=2
    llama|cp=2 method=allgather accum=2
    llama|cp=2 method=ulysses accum=2
    llama|pp=2 engine=afab accum=4
    llama|pp=2 engine=1f1b accum=4
    llama|pp=2 engine=1f1b accum=8
    llama|pp=2 engine=interleaved_1f1b accum=4
    llama|pp=2 engine=1f1b recompute=true accum=4
    gpt_neox|pp=2 engine=1f1b accum=4
"""
CPU = torch.device("cpu")
STEPS, REPEATS = 5, 12
PRODUCTS = 8  # of 512 by 512 between two messages: about 20 ms, as between two in a step
BEYOND_CACHES, MOST_SETS = 64e6, 48  # bytes of the inputs of an operator's calls, which take turns
MESSAGES = [4 * 8**power for power in range(9)]  # bytes
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda whole, half: dist.all_reduce(whole),
    "gather": lambda whole, half: dist.all_gather_into_tensor(whole, half),
    "scatter": lambda whole, half: dist.reduce_scatter_tensor(half, whole),
    "exchange": lambda whole, half: dist.all_to_all_single(torch.empty_like(whole), whole),
    "broadcast": lambda whole, half: dist.broadcast(whole, 0),
    "functional sum": lambda whole, half: wait_tensor(all_reduce(whole, "sum", dist.group.WORLD)),
    "functional gather": lambda whole, half: wait_tensor(all_gather_tensor(half, 0, dist.group.WORLD)),
    "functional scatter": lambda whole, half: wait_tensor(reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD)),
    "functional exchange": lambda whole, half: wait_tensor(all_to_all_single(whole, None, None, dist.group.WORLD)),
    "send": lambda whole, half: dist.send(whole, 1) if dist.get_rank() == 0 else dist.recv(whole, 0),
}
BEYOND = 4e9
"""Bytes/s of an operator that cannot be called alone."""


@dataclass(frozen=True)
class Shape:
    """A tensor of a call."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """One like it."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        return made.fill_(0.02 if self.dtype.is_floating_point else 0)

    @property
    def bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.size) * self.dtype.itemsize


class Calls(Trace):
    """A trace on a CPU whose operators' sites are their calls, by name and shapes, as keys of `calls`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: dict[str, tuple[str, Any, float]] = {}
        self.functional = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":  # a number or two that ranks agree on
            return function(*args, **(kwargs or {}))
        shapes = tree_map(_shape, (args, kwargs or {}))
        self.call = f"{function}{shapes}", (str(function), shapes)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _functional(self, *args: Any) -> None:
        self.functional = "functional "
        super()._functional(*args)
        self.functional = ""

    def _communicate(self, kind: str, *args: Any) -> int:
        return super()._communicate(self.functional + kind, *args)

    def _run(self, operator: Operator) -> None:
        key, call = self.call
        self.calls.setdefault(key, (*call, operator.moved))
        self.events.append(Ran(0, operator._replace(site=key), torch._C._current_autograd_node() is not None))


def _shape(value: Any) -> Any:
    return Shape(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value


class Times:
    """Seconds of operators on `ranks` cores at once, `in_a_step` times as long there, and of messages of two ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.of_calls: dict[str, list[float]] = defaultdict(list)
        self.of_messages: dict[str, list[list[float]]] = {kind: [[] for _ in MESSAGES] for kind in COLLECTIVES}
        self.in_a_step = 1.0

    def measure(self, calls: dict[str, tuple[str, Any, float]]) -> None:
        """Time calls."""
        for found in run_ranks(self.ranks, seconds_of_calls, calls):
            for key, seconds in found.items():
                self.of_calls[key] += seconds

    def measure_messages(self) -> None:
        """Time messages."""
        first, second = run_ranks(2, messages)
        for kind, known in self.of_messages.items():
            for seconds, *of_ranks in zip(known, first[kind], second[kind]):
                seconds += map(statistics.mean, zip(*of_ranks))

    @cached_property
    def usual(self) -> dict[str, float]:
        """Of each call, when all have been timed."""
        return {call: lower_quartile(seconds) for call, seconds in self.of_calls.items()}

    def of(self, operator: Operator, gpu: None) -> float:
        """An operator."""
        return self.usual[operator.site] * self.in_a_step

    def between(self, kind: str, moved: float, group: Any, gpu: None) -> float:
        """A collective, between the two messages that were timed next to it, by logarithms."""
        if group.size == 1:
            return 0.0
        known = self.of_messages["send" if kind == "receive" else kind]
        at = min(max(int(math.log(max(moved, 4) / 4, 8)), 0), len(MESSAGES) - 2)
        low, high = statistics.median(known[at]), statistics.median(known[at + 1])
        return float(low * (max(moved, 4) / MESSAGES[at]) ** (math.log(high / low) / math.log(8)))

    def play(self, traces: list[list[Event]], micro_batches: int) -> float:
        """Seconds of a step."""
        with (
            patch.object(timeline, "HOST", 0.0),  # a CPU computes before it goes on
            patch.object(timeline, "seconds_of", self.of),
            patch.object(timeline, "seconds_between", self.between),
        ):
            return timeline.play(traces, None, micro_batches)[0].seconds  # type: ignore[arg-type]


def lower_quartile(seconds: list[float]) -> float:
    """A quarter of all are less."""
    return sorted(seconds)[len(seconds) // 4]


def seconds_of_calls(rank: int, calls: dict[str, tuple[str, Any, float]]) -> dict[str, list[float]]:
    """Seconds of each call, while all ranks compute."""
    torch.set_num_threads(1)
    keep_freed_memory()
    found = {}
    for key, call in calls.items():
        dist.barrier()
        found[key] = seconds_of_call(*call)
    return found


def seconds_of_call(name: str, shapes: Any, moved: float) -> list[float]:
    """Seconds of some calls, on inputs that take turns. Results are kept, as those of a forward pass are."""
    space, operator, overload = name.split(".")
    function = getattr(getattr(getattr(torch.ops, space), operator), overload)
    inputs = sum(each.bytes for each in tree_leaves(shapes) if isinstance(each, Shape))
    count = min(MOST_SETS, max(3, math.ceil(BEYOND_CACHES / max(1, inputs))))
    sets = [tree_map(lambda each: each.tensor() if isinstance(each, Shape) else each, shapes) for _ in range(count)]
    made: list[object] = []

    def call(args: Any, kwargs: Any) -> None:
        made.append(function(*args, **kwargs))

    try:
        with torch.no_grad():
            for each in sets:
                call(*each)
            made.clear()  # the memory of the results, which the timed calls get again
            return [timed(partial(call, *each)) for each in sets]
    except RuntimeError:  # one that looks at its numbers
        return [moved / BEYOND]


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def messages(rank: int) -> dict[str, list[list[float]]]:
    """Kind of collective → for each of `MESSAGES` the seconds of some, with waiting for the other rank."""
    torch.set_num_threads(1)
    keep_freed_memory()
    found: dict[str, list[list[float]]] = {kind: [] for kind in COLLECTIVES}
    matrix = torch.full((512, 512), 0.02)
    for kind, size in itertools.product(COLLECTIVES, MESSAGES):
        whole, half = torch.ones(max(2, size // 4)), torch.ones(max(1, size // 8))
        seconds = []
        for _ in range(REPEATS):
            dist.barrier()
            for _ in range(PRODUCTS):
                matrix @ matrix
            seconds.append(timed(partial(COLLECTIVES[kind], whole, half)))
        found[kind].append(seconds)
    return found


def config_of(case: str, shapes: dict[str, int]) -> Config:
    """The config of ``family|layout|override|…``."""
    family, layout, *overrides = case.split("|")
    problem = problem_of_family(family, "tokens.sequence_length=256", *overrides)
    keys = {key: value for key, value in shapes.items() if key not in problem.absent}
    return replace(problem, model=problem.model | keys).config(layout, Path("never-written"))


def traced(config: Config, rank: int) -> tuple[list[Event], dict[str, tuple[str, Any, float]]]:
    """The events of a rank's step, and its calls; once in a process."""
    torch.set_num_threads(1)
    world = config.parallelism.world_size
    with on_fake_rank(config, rank, CPU, world) as mesh, routing_in_balance(), Ledger() as ledger:
        run = build_on(config, mesh, CPU, attention_of_run(config, CPU)[0])
        naming = Naming(ledger, run)
        trace = Calls(mesh, world, "cpu")
        follow_steps(run, ledger, naming, trace)
        return trace.events, trace.calls


def measured(rank: int, case: str, shapes: dict[str, int]) -> list[float]:
    """Seconds of some steps."""
    torch.set_num_threads(1)
    keep_freed_memory()
    config = config_of(case, shapes)
    world = config.parallelism.world_size
    mesh = Mesh() if world == 1 else build_mesh(axes(config), world, "cpu")
    run = build_on(config, mesh, CPU, attention_of_run(config, CPU)[0])
    fill_weights(run.parts, config.model.init_method, config.general.seed)
    batches, seconds = [batch_of(config)] * config.tokens.batch_accumulation_per_replica, []
    for _ in range(STEPS):
        dist.barrier()
        seconds.append(timed(lambda: (train_step(run, batches), dist.barrier())))
        run.step += 1
    return seconds[1:]


class Case:
    """A layout: its traces, and the seconds of its slowest rank's steps in all rounds."""

    def __init__(self, name: str, shapes: dict[str, int]) -> None:
        self.name, self.shapes = name, shapes
        self.seconds: list[float] = []
        config = config_of(name, shapes)
        self.micro_batches, self.ranks = config.tokens.batch_accumulation_per_replica, config.parallelism.world_size
        with multiprocessing.get_context("forkserver").Pool(1, maxtasksperchild=1) as pool:
            traces = [pool.apply(traced, (config, rank)) for rank in first_ranks(config)]
        self.traces = [events for events, _ in traces]
        self.calls = {key: call for _, calls in traces for key, call in calls.items()}

    def measure(self, times: Times) -> None:
        """Time its operators and its steps once more, on as many cores at once as `times` has ranks."""
        times.measure(self.calls)
        self.seconds += map(max, zip(*run_ranks(times.ranks, measured, self.name, self.shapes)))

    def planned(self, times: Times) -> float:
        """Seconds of a step."""
        return times.play(self.traces, self.micro_batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only layouts that contain one of these, between semicolons")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring (default: 3)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    words = given.only.split(";")
    names = [line.strip() for line in LAYOUTS.strip().splitlines() if any(word in line for word in words)]
    cases, begun = [Case(name, SHAPES) for name in names], time.monotonic()
    times = {ranks: Times(ranks) for ranks in {case.ranks for case in cases}}
    alone = {ranks: Case(ALONE, SHAPES) for ranks in times}
    for done in range(1, given.rounds + 1):
        for ranks, each in alone.items():
            each.measure(times[ranks])
            if ranks > 1:
                times[ranks].measure_messages()
        for case in cases:
            case.measure(times[case.ranks])
        left = (time.monotonic() - begun) / done * (given.rounds - done)
        print(f"{done} of {given.rounds} rounds, {left / 60:.0f} min left", file=sys.stderr)
    for ranks, each in alone.items():
        times[ranks].in_a_step = lower_quartile(each.seconds) / each.planned(times[ranks])
        print(f"In a step operators take {times[ranks].in_a_step:.2f} of their time alone, on {ranks} cores")
    print(f"{'layout':60} planned ms  measured  planned too much")
    found = [(case.planned(times[case.ranks]), lower_quartile(case.seconds)) for case in cases]
    for case, (planned, real) in zip(cases, found):
        print(f"{case.name:60} {1e3 * planned:10.1f} {1e3 * real:9.1f} {planned / real - 1:+17.1%}")
    errors = [abs(planned / real - 1) for planned, real in found]
    pairs = [(a, b) for a, b in itertools.combinations(found, 2) if max(a[1], b[1]) > 1.1 * min(a[1], b[1])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    print(f"{len(errors)} layouts: median {statistics.median(errors):.1%}, worst {max(errors):.1%} (bar: median 5%)")
    print(f"{len(pairs)} pairs that differ by more than 10%: {right / max(1, len(pairs)):.1%} named rightly (bar: 95%)")


if __name__ == "__main__":
    main()
