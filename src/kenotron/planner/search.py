"""Layouts of a run on as many GPUs and with the same global batch, the fastest first.

    for layout in search(config, changed, gpu, report):
        layout.overrides, layout.peak, layout.speed        # speed is None where nothing tried fits

Every shape (tp, pp, ZeRO stage) is planned with less and less kept for the backward pass, and with smaller
micro-batches, until its first rank fits: what fits first is the fastest of its shape, or nearly. Then the fastest
shapes are changed in one thing each, twice: the pipeline engine, ZeRO 2 or hybrid, context or expert parallelism.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import TYPE_CHECKING, NamedTuple

from kenotron.config.errors import InputError
from kenotron.config.parallelism import STRATEGIES, ZERO_BUBBLE_ENGINES
from kenotron.config.runs import same_batch_overrides
from kenotron.planner.hardware import GIB, GPUS
from kenotron.planner.memory import first_ranks, plan_memory
from kenotron.planner.speed import Speed, speed_of
from kenotron.planner.verdict import COLUMNS, in_batches_of, usable

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu

SHAPE = ("dp", "tp", "pp", "pp_engine", "context_parallel_size", "expert_parallel_size", "zero_stage", "dp_shard")
SHOWN_IF_SET = {"pp_engine": "", "context_parallel_size": "1", "expert_parallel_size": "1", "dp_shard": ""}
DEGREES = (1, 2, 4, 8, 16)
ENGINES = ("1f1b", "interleaved_1f1b", *ZERO_BUBBLE_ENGINES)
CHANGED, ROUNDS = 3, 2
"""So many of the fastest shapes are changed in one thing, so many times."""
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
    tried: dict[tuple[str, ...], Layout | None] = {}  # None: this model does not allow the shape
    ranked: list[Layout] = []
    refused = ""

    def best(overrides: list[str]) -> Layout | None:
        nonlocal refused
        try:
            return best_of(overrides, changed(overrides), changed, gpu, room)
        except InputError as error:
            refused = str(error)
            return None

    candidates = list(shapes_of(config, gpu))
    with ThreadPool(os.cpu_count()) as pool:  # each waits for a process that plans; none is waited for at Ctrl-C
        for _ in range(1 + ROUNDS):
            shapes = {shape: each for each in candidates if (shape := _shape(each)) not in tried}
            total = len(tried) + len(shapes)
            for shape, layout in zip(shapes, pool.imap(best, shapes.values())):
                tried[shape] = layout
                if report is not None:
                    report(len(tried), total)
            ranked = sorted((layout for layout in tried.values() if layout is not None), key=_order)
            candidates = [
                _replaced(layout.overrides, change)
                for layout in ranked[:CHANGED]
                for change in changes(changed(layout.overrides), gpu)
            ]
    if not ranked:
        raise InputError(f"--search: no layout of {config.parallelism.world_size} ranks suits this config: {refused}")
    return ranked


def _order(layout: Layout) -> tuple[bool, float]:
    return layout.speed is None, layout.peak if layout.speed is None else layout.speed.seconds


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
    of_layouts = [_values(layout.overrides) for layout in layouts]
    hidden = [key for key, default in SHOWN_IF_SET.items() if all(values[key] == default for values in of_layouts)]
    keys = [key for key in (*SHAPE, "recompute_layer", "micro_batch_size") if key not in hidden]
    rows: list[Sequence[str]] = []
    for layout, values in zip(layouts, of_layouts):
        fast = ["", "", ""]
        if layout.speed is not None:
            fast = [f"{1000 * layout.speed.seconds:,.0f}", f"{layout.speed.of_a_gpu:,.0f}", f"{layout.speed.mfu:.1%}"]
        memory = f"{layout.peak / GIB:.3g}"
        rows.append((*(values[key] for key in keys), memory, *fast, why(layout, layouts[0])))
    return (*keys, "GiB", "ms", "tokens/s", "MFU", "beside the first"), rows


def _values(overrides: Sequence[str]) -> dict[str, str]:
    """The values of a layout's overrides by the last part of their keys."""
    pairs = (override.rsplit(".", 1)[-1].split("=") for override in overrides)
    return SHOWN_IF_SET | {key: "" if value == "null" else value for key, value in pairs}


def _shape(overrides: Sequence[str]) -> tuple[str, ...]:
    values = _values(overrides)
    return tuple(values[key] for key in SHAPE)


def _replaced(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Overrides of which some are replaced by `more` of the same keys."""
    return list({override.split("=")[0]: override for override in (*overrides, *more)}.values())


def shapes_of(config: Config, gpu: Gpu) -> Iterator[list[str]]:
    """Overrides for tp, pp and ZeRO; cp and ep stay."""
    layout, ranks = config.parallelism, config.parallelism.world_size
    kept = {"context_parallel_size": layout.context_parallel_size, "expert_parallel_size": layout.expert_parallel_size}
    stays = [f"parallelism.{key}={degree}" for key, degree in kept.items() if degree > 1]
    of_one_layout = ["dp_shard", "pp_stages_per_rank", "pp_layers"]
    if layout.strategy in STRATEGIES:  # another name of the ZeRO stage
        of_one_layout.append("strategy")
    stays += [f"parallelism.{key}=null" for key in of_one_layout if getattr(layout, key) is not None]
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
                    *stays,
                    *same_batch_overrides(config, dp),
                ]


def changes(config: Config, gpu: Gpu) -> Iterator[list[str]]:
    """Overrides that change one thing of a layout, some of which its model may not allow."""
    layout, experts = config.parallelism, getattr(config.model.architecture, "experts", 0)
    cp, ep = layout.context_parallel_size, layout.expert_parallel_size
    copies = layout.dp * cp
    if layout.pp > 1:
        yield from ([f"parallelism.pp_engine={engine}"] for engine in ENGINES)
    if config.zero_stage == 1:
        yield ["optimizer.zero_stage=2"]
    shard = gpu.in_machine // layout.tp
    if config.zero_stage == 3 and 1 < shard < layout.dp:
        yield ["optimizer.zero_stage=hybrid", f"parallelism.dp_shard={shard}"]
    for size in (2 * cp, cp // 2):
        if size and copies % size == 0 and config.global_batch_size % (copies // size) == 0:
            batch = same_batch_overrides(config, copies // size)
            yield [f"parallelism.context_parallel_size={size}", f"parallelism.dp={copies // size}", *batch]
    if experts:
        sizes = {2 * ep, ep // 2, math.gcd(experts, gpu.in_machine, copies)}
        yield from ([f"parallelism.expert_parallel_size={size}"] for size in sorted(sizes - {0}))


def best_of(
    overrides: list[str], config: Config, changed: Callable[[list[str]], Config], gpu: Gpu, room: int
) -> Layout:
    """The first way in which this shape fits into `room` bytes, or its smallest."""
    tried = Layout(overrides, 0, None)
    for more in _ways(config):
        tried = Layout(_replaced(overrides, more), 0, None)
        other = changed(tried.overrides)
        first = plan_memory(other, gpu, [0])[0]
        tried = tried._replace(peak=first.peak.bytes)
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
