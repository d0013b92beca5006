"""Layouts of a run on as many GPUs and with the same global batch, the fastest first.

    for layout in search(config, changed, gpu, report):
        layout.overrides, layout.peak, layout.speed        # speed is None where nothing tried fits

Every shape (tp, pp, ZeRO stage) is planned with less and less kept for the backward pass, and with smaller
micro-batches, until its first rank fits: what fits first is the fastest of its shape, or nearly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, NamedTuple

from kenotron.config.errors import InputError
from kenotron.config.runs import same_batch_overrides
from kenotron.planner.hardware import GIB, GPUS
from kenotron.planner.memory import first_ranks, plan_memory
from kenotron.planner.speed import Speed, speed_of
from kenotron.planner.verdict import COLUMNS, in_batches_of, usable

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu

SHAPE = ("dp", "tp", "pp", "zero_stage", "recompute_layer", "micro_batch_size")
DEGREES = (1, 2, 4, 8, 16)
RECOMPUTED = ("false", "selective", "true")
TOKENS, TOKENS_OF_A_STAGE = 16384, 4096
"""Of a micro-batch: more make products no faster; with pipeline stages many small ones shorten the bubble."""


class Layout(NamedTuple):
    """`overrides` of the config, the bytes of its largest rank, and its speed if that fits."""

    overrides: list[str]
    peak: int
    speed: Speed | None


def search(
    config: Config,
    changed: Callable[[list[str]], Config],
    gpu: Gpu | None,
    report: Callable[[int, int], None] | None = None,
) -> list[Layout]:
    """The best of every shape on the config's number of GPUs: those that fit by speed, then the others by memory.

    `changed` makes a config with some overrides. `report` is told how many shapes are done, and of how many.
    Raises InputError if no shape is a layout of this config, or no time is known of it or of `gpu`.
    """
    if gpu is None or not gpu.flops:
        raise InputError(f"--search: it needs a kind of GPU whose speed is known; give --gpu {' | '.join(GPUS)}")
    if config.parallelism.cpu_offload:
        raise InputError("--search: no time is known of updates on the host (parallelism.cpu_offload)")
    room = usable(int(gpu.memory_gib * GIB), gpu)
    shapes = []
    for overrides in _shapes(config, gpu):
        try:
            shapes.append((overrides, changed(overrides)))
        except InputError:  # what this model does not allow
            continue
    if not shapes:
        raise InputError(f"--search: no layout of {config.parallelism.world_size} ranks suits this config")
    found = []
    with ThreadPool(os.cpu_count()) as pool:  # each waits for a process that plans; none is waited for at Ctrl-C
        for layout in pool.imap(lambda shape: best_of(shape[0], shape[1], changed, gpu, room), shapes):
            found.append(layout)
            if report is not None:
                report(len(found), len(shapes))
    return sorted(found, key=lambda each: (each.speed is None, each.speed.seconds if each.speed else each.peak))


def why(layout: Layout, best: Layout) -> str:
    """What makes a layout slower than the best one: what its first rank spends most more time on."""
    if layout.speed is None or best.speed is None:
        return "does not fit"
    of_best = best.speed.ranks[0].of
    more = {name: seconds - of_best.get(name, 0.0) for name, seconds in layout.speed.ranks[0].of.items()}
    name = max(more, key=more.__getitem__)
    return f"{name}: {1000 * more[name]:,.0f} ms more" if more[name] > 0 else ""


def table(layouts: Sequence[Layout]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Names of columns, and for each layout a row of texts."""
    rows: list[Sequence[str]] = []
    for layout in layouts:
        values = dict(override.rsplit(".", 1)[-1].split("=") for override in layout.overrides)
        fast = ["", "", ""]
        if layout.speed is not None:
            fast = [f"{1000 * layout.speed.seconds:,.0f}", f"{layout.speed.of_a_gpu:,.0f}", f"{layout.speed.mfu:.1%}"]
        memory = f"{layout.peak / GIB:.3g}"
        rows.append((*(values[name] for name in SHAPE), memory, *fast, why(layout, layouts[0])))
    return (*SHAPE, "GiB", "ms", "tokens/s", "MFU", "beside the first"), rows


def _shapes(config: Config, gpu: Gpu) -> Iterator[list[str]]:
    """Overrides for tp, pp and ZeRO; cp and ep stay."""
    layout, ranks = config.parallelism, config.parallelism.world_size
    for tp in DEGREES:
        for pp in DEGREES:
            dp, rest = divmod(ranks, tp * pp * layout.context_parallel_size)
            if rest or not dp or tp > gpu.in_machine or config.global_batch_size % dp:
                continue
            copies = dp * layout.context_parallel_size
            for stage in [0] if copies == 1 else [1] if pp > 1 else [1, 3]:
                yield [
                    f"parallelism.dp={dp}",
                    f"parallelism.tp={tp}",
                    f"parallelism.pp={pp}",
                    *(["parallelism.tp_mode=REDUCE_SCATTER"] if tp > 1 else []),
                    *(["parallelism.pp_engine=1f1b"] if pp > 1 else []),
                    f"optimizer.zero_stage={stage}",
                    *same_batch_overrides(config, dp),
                ]


def best_of(
    overrides: list[str], config: Config, changed: Callable[[list[str]], Config], gpu: Gpu, room: int
) -> Layout:
    """The first way in which this shape fits into `room` bytes, or its smallest."""
    tried = Layout(overrides, 0, None)
    for more in _ways(config):
        by_key = {override.split("=")[0]: override for override in (*overrides, *more)}
        other = changed(list(by_key.values()))
        first = plan_memory(other, gpu, [0])[0]
        tried = Layout(list(by_key.values()), first.peak.bytes, None)
        if sum(first.peak.of.get(kind, 0) for kind in COLUMNS[:3]) >= room:
            break
        if first.peak.bytes < room:
            others = first_ranks(other)[1:]
            plans = [first, *(plan_memory(other, gpu, others) if others else ())]
            peak = max(each.peak.bytes for each in plans)
            if peak < room:
                return Layout(tried.overrides, peak, speed_of(other, gpu, plans))
    return tried


def _ways(config: Config) -> Iterator[Sequence[str]]:
    """Recomputation and micro-batches, by what they cost."""
    tokens, length = config.tokens, max(config.sequence_lengths.values())
    per_replica = tokens.batch_accumulation_per_replica * tokens.micro_batch_size
    enough = (TOKENS if config.parallelism.pp == 1 else TOKENS_OF_A_STAGE) // length
    large = max(size for size in (1, 2, 4, 8) if per_replica % size == 0 and size <= max(1, enough))
    for recompute in RECOMPUTED:
        for size in dict.fromkeys((large, 1)):
            yield [f"parallelism.recompute_layer={recompute}", *in_batches_of(config, size)]
