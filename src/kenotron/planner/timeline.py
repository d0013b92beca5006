"""Simulate the time of a step: replay the traces of one rank of every pipeline stage together.

    spent = play([trace.events for trace in traces], gpu)
    spent[0].seconds, spent[0].of          # 3.21, {"products": 2.2, "attention": 0.4, …, "waits for tp": 0.3, …}

Each queue of a rank continues when its dependencies are complete: its own operators, another queue, a collective, a
message from another stage. Transfers of one group are sequential, and run beside computation without slowing it. So
overlap and the bubble follow from the run's own schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kenotron.planner.rates import HOST, seconds_between, seconds_of
from kenotron.planner.trace import Began, Communicated, Event, Marked, Ran, Waited

if TYPE_CHECKING:
    from kenotron.planner.hardware import Gpu

Wire = tuple[int, int]  # from one stage to another
Bar = tuple[float, float, str, int]
KINDS = {"product": "products", "attention": "attention", "memory": "other kernels"}
SHORT = 1e-4
"""A gap in seconds between two operators up to which they are one bar."""


class Spent(NamedTuple):
    """The seconds of a rank's step, in parts (`of`), and by (kind, site) of the calling functions, longest first.

    `bars`: the times of "forward", "backward" and "update" in the traced steps: (begin, end, which, number of the
    micro-batch that began last).
    """

    seconds: float
    of: dict[str, float]
    largest: list[tuple[str, str, float]]
    bars: list[Bar]


@dataclass
class Rank:
    """The state of a rank: the times that its host, its queues and its groups have reached."""

    stage: int
    host: float = 0.0
    asked: float = 0.0  # time of the host for all micro-batches, without its waits
    queues: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    channels: defaultdict[object, float] = field(default_factory=lambda: defaultdict(float))
    marks: dict[int, tuple[float, str]] = field(default_factory=dict)  # mark → its time, and the reason of its wait
    received: Counter[Wire] = field(default_factory=Counter)
    awaited: dict[int, tuple[Wire, int]] = field(default_factory=dict)  # mark → the message that it waits for
    reasons: dict[int, str] = field(default_factory=dict)  # queue → the reason of its last wait
    of: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sites: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    updates: bool = False
    bars: list[Bar] = field(default_factory=list)
    began: list[dict[str, float]] = field(default_factory=list)  # `of` at every `Began`


def play(traces: Sequence[Sequence[Event]], gpu: Gpu, micro_batches: int) -> list[Spent]:
    """Return the times of the pipeline's stages, in their order, for a step of `micro_batches`.

    Traces may have fewer micro-batches: each missing one adds the slowest stage's time for a micro-batch.
    """
    arrived: defaultdict[Wire, list[float]] = defaultdict(list)
    ranks = [Rank(stage) for stage in range(len(traces))]
    running = [_steps(rank, trace, gpu, arrived) for rank, trace in zip(ranks, traces)]
    while running:  # each runs until it waits for a message that has not been sent
        before = len(running), sum(map(len, arrived.values()))
        running = [steps for steps in running if next(steps, "ended") != "ended"]
        if running and before == (len(running), sum(map(len, arrived.values()))):
            raise ValueError(f"{len(running)} of {len(ranks)} stages wait for messages that no stage sends")
    more = [_of_a_micro_batch(rank, len(ranks)) for rank in ranks]
    missing = micro_batches - (len(ranks[0].began) - 1)  # `began` includes the update
    seconds = max(rank.queues[0] for rank in ranks) + missing * max(sum(parts.values()) for parts in more)
    return [_spent(rank, parts, missing, seconds) for rank, parts in zip(ranks, more)]


def _steps(rank: Rank, trace: Sequence[Event], gpu: Gpu, arrived: defaultdict[Wire, list[float]]) -> Iterator[None]:
    """Replay the trace; yield whenever a message has not been sent yet."""
    for event in trace:
        match event:
            case Ran(queue, operator, backward):
                _ask(rank)
                _wait(rank, queue, rank.host, "host")
                seconds = seconds_of(operator, gpu)
                rank.queues[queue] += seconds
                if queue == 0:
                    which = "backward" if backward else "forward"
                    _draw(rank, seconds, "update" if rank.updates else which)
                    rank.of[KINDS[operator.kind]] += seconds
                    rank.sites[KINDS[operator.kind], operator.site] += seconds
            case Marked(queue, mark):
                rank.marks[mark] = rank.queues[queue], rank.reasons.get(queue, "other queues")
            case Waited(queue, mark):
                while mark in rank.awaited and len(arrived[rank.awaited[mark][0]]) <= rank.awaited[mark][1]:
                    yield
                if mark in rank.awaited:
                    wire, number = rank.awaited.pop(mark)
                    rank.marks[mark] = arrived[wire][number], "pp"
                moment, reason = rank.marks[mark]
                if queue is None:
                    rank.host = max(rank.host, moment)
                else:
                    _wait(rank, queue, moment, reason)
            case Communicated():
                _ask(rank)
                _communicate(rank, event, gpu, arrived)
            case Began(what):
                rank.updates = what == "update"
                rank.began.append(dict(rank.of))


def _ask(rank: Rank) -> None:
    """Let the host ask for a kernel or a transfer."""
    rank.host += HOST
    if not rank.updates:
        rank.asked += HOST


def _draw(rank: Rank, seconds: float, which: str) -> None:
    """Add an operator that ends now to the bars, by extending the last one if there is no gap."""
    end, number = rank.queues[0], len(rank.began)
    if rank.bars and rank.bars[-1][2:] == (which, number) and end - seconds <= rank.bars[-1][1] + SHORT:
        rank.bars[-1] = (rank.bars[-1][0], end, which, number)
    else:
        rank.bars.append((end - seconds, end, which, number))


def _wait(rank: Rank, queue: int, moment: float, reason: str) -> None:
    """Let the queue continue no earlier than `moment`."""
    if moment <= rank.queues[queue]:
        return
    rank.reasons[queue] = reason
    if queue == 0:
        rank.of[f"waits for {reason}"] += moment - rank.queues[0]
    rank.queues[queue] = moment


def _communicate(rank: Rank, event: Communicated, gpu: Gpu, arrived: defaultdict[Wire, list[float]]) -> None:
    """Start a transfer when its queue, the host and the group have reached it."""
    of_pipeline = event.group.name == "pp"
    if event.kind == "receive" and of_pipeline:
        wire = event.peer, rank.stage
        rank.awaited[event.mark] = wire, rank.received[wire]
        rank.received[wire] += 1
        return
    channel = (event.group, event.kind, event.peer)
    begin = max(rank.queues[event.queue], rank.host, rank.channels[channel])
    end = begin + seconds_between(event.kind, event.moved, event.group, gpu)
    rank.channels[channel] = end
    rank.marks[event.mark] = end, event.group.name
    if of_pipeline and event.kind == "send":
        arrived[rank.stage, event.peer].append(end)


def _of_a_micro_batch(rank: Rank, stages: int) -> dict[str, float]:
    """Return the times of an additional micro-batch: the last complete one without pp, else the mean without waits.

    Where the host is slower than the GPU, the GPU waits for it in each.
    """
    update = rank.began[-1]
    if stages == 1:
        before, last = rank.began[-3:-1] if len(rank.began) > 2 else (update, update)
        return {name: seconds - before.get(name, 0.0) for name, seconds in last.items()}
    count = len(rank.began) - 1
    waits = ("waits for pp", "waits for host")
    parts = {name: seconds / count for name, seconds in update.items() if name not in waits}
    if (idle := rank.asked / count - sum(parts.values())) > 0:
        parts["waits for host"] = idle
    return parts


def _spent(rank: Rank, of_a_micro_batch: dict[str, float], missing: int, seconds: float) -> Spent:
    of = {name: traced + missing * of_a_micro_batch.get(name, 0.0) for name, traced in rank.of.items()}
    if (idle := seconds - sum(of.values())) > 1e-9 * seconds:  # more than rounding
        of["waits for pp"] = of.get("waits for pp", 0.0) + idle
    longest = [(*site, traced) for site, traced in sorted(rank.sites.items(), key=lambda item: -item[1])]
    return Spent(seconds, dict(sorted(of.items(), key=lambda item: -item[1])), longest, rank.bars)
