"""Search layouts of a run with the same number of GPUs and the same global batch, fastest first.

    for layout in search(config, with_overrides, gpu, report):
        layout.overrides, layout.peak, layout.speed        # speed is None if nothing tried fits

Every shape (tp, pp, ZeRO stage) is planned with more and more recomputation, and with smaller micro-batches, until its
first rank fits: the first plan that fits is the fastest of its shape, or nearly. Then one setting of the fastest
shapes is changed, twice: the pipeline engine, ZeRO 2 or hybrid, context or expert parallelism.
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
"""How many of the fastest shapes are changed in one setting, and how many times."""
RECOMPUTED = ("false", "selective", "true")
TOKENS, TOKENS_OF_A_STAGE = 16384, 4096
"""Tokens of a micro-batch: more tokens make products no faster. With pp, smaller micro-batches shorten the bubble."""


class Layout(NamedTuple):
    """The `overrides` of a layout, the bytes of its largest rank, and its speed if it fits."""

    overrides: list[str]
    peak: int
    speed: Speed | None


def search(
    config: Config,
    with_overrides: Callable[[list[str]], Config],
    gpu: Gpu | None,
    report: Callable[[int, int], None] | None = None,
) -> list[Layout]:
    """Return the best layout of every shape on the config's number of GPUs, by speed; then those that do not fit.

    `with_overrides` makes a config with some overrides. `report` gets the number of planned shapes, and of all shapes.
    Raises InputError if no shape suits this config, or times are unknown for it or for `gpu`.
    """
    if gpu is None or not gpu.flops:
        raise InputError(f"--search: it needs a kind of GPU whose speed is known; give --gpu {' | '.join(GPUS)}")
    if config.parallelism.cpu_offload:
        raise InputError("--search: no time is known of updates on the host (parallelism.cpu_offload)")
    room = usable(int(gpu.memory_gib * GIB), gpu)
    tried: dict[tuple[str, ...], Layout | None] = {}  # None: the model does not allow the shape
    ranked: list[Layout] = []
    refused = ""

    def best(overrides: list[str]) -> Layout | None:
        nonlocal refused
        try:
            return best_of(overrides, with_overrides(overrides), with_overrides, gpu, room)
        except InputError as error:
            refused = str(error)
            return None

    candidates = list(shapes_of(config, gpu))
    with ThreadPool(os.cpu_count()) as pool:  # threads wait for processes that plan, and are not joined at Ctrl-C
        for _ in range(1 + ROUNDS):
            if ranked:
                candidates = [
                    _replaced(layout.overrides, change)
                    for layout in ranked[:CHANGED]
                    for change in changes(with_overrides(layout.overrides), gpu)
                ]
            shapes = {shape: overrides for overrides in candidates if (shape := _shape(overrides)) not in tried}
            total = len(tried) + len(shapes)
            for shape, layout in zip(shapes, pool.imap(best, shapes.values())):
                tried[shape] = layout
                if report is not None:
                    report(len(tried), total)
            ranked = sorted((layout for layout in tried.values() if layout is not None), key=_order)
    if not ranked:
        raise InputError(f"--search: no layout of {config.parallelism.world_size} ranks suits this config: {refused}")
    return ranked


def _order(layout: Layout) -> tuple[bool, float]:
    return layout.speed is None, layout.peak if layout.speed is None else layout.speed.seconds


def why(layout: Layout, best: Layout) -> str:
    """Return why a layout is slower than the best: the part of the first rank's step that grows most."""
    if layout.speed is None or best.speed is None:
        return "does not fit"
    best_parts = best.speed.ranks[0].of
    more = {name: seconds - best_parts.get(name, 0.0) for name, seconds in layout.speed.ranks[0].of.items()}
    name = max(more, key=more.__getitem__)
    return f"{name}: {1000 * more[name]:,.0f} ms more" if more[name] > 0 else ""


def table(layouts: Sequence[Layout]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the names of columns, and for each layout a row of texts."""
    settings = [_values(layout.overrides) for layout in layouts]
    hidden = [key for key, default in SHOWN_IF_SET.items() if all(values[key] == default for values in settings)]
    keys = [key for key in (*SHAPE, "recompute_layer", "micro_batch_size") if key not in hidden]
    rows: list[Sequence[str]] = []
    for layout, values in zip(layouts, settings):
        speed = ["", "", ""]
        if layout.speed is not None:
            speed = [f"{1000 * layout.speed.seconds:,.0f}", f"{layout.speed.of_a_gpu:,.0f}", f"{layout.speed.mfu:.1%}"]
        memory = f"{layout.peak / GIB:.3g}"
        rows.append((*(values[key] for key in keys), memory, *speed, why(layout, layouts[0])))
    return (*keys, "GiB", "ms", "tokens/s", "MFU", "beside the first"), rows


def _values(overrides: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key → its value in a layout's overrides, with defaults of SHOWN_IF_SET."""
    pairs = (override.rsplit(".", 1)[-1].split("=") for override in overrides)
    return SHOWN_IF_SET | {key: "" if value == "null" else value for key, value in pairs}


def _shape(overrides: Sequence[str]) -> tuple[str, ...]:
    values = _values(overrides)
    return tuple(values[key] for key in SHAPE)


def _replaced(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return `overrides` with those of `more` added, or in place of the same keys."""
    return list({override.split("=")[0]: override for override in (*overrides, *more)}.values())


def shapes_of(config: Config, gpu: Gpu) -> Iterator[list[str]]:
    """Yield overrides for all tp, pp and ZeRO stages, with unchanged cp and ep."""
    layout, ranks = config.parallelism, config.parallelism.world_size
    degrees = {key: getattr(layout, key) for key in ("context_parallel_size", "expert_parallel_size")}
    unchanged = [f"parallelism.{key}={degree}" for key, degree in degrees.items() if degree > 1]
    own = ["dp_shard", "pp_stages_per_rank", "pp_layers"]  # suit the config's layout only
    if layout.strategy in STRATEGIES:  # another name of the ZeRO stage
        own.append("strategy")
    unset = [f"parallelism.{key}=null" for key in own if getattr(layout, key) is not None]
    for tp in DEGREES:
        for pp in DEGREES:
            dp, rest = divmod(ranks, tp * pp * layout.context_parallel_size)
            if rest or not dp or tp > gpu.in_machine or config.global_batch_size % dp:
                continue
            replicas = dp * layout.context_parallel_size
            sharded = [1] if pp > 1 else [1, 3]
            for stage in sharded if replicas > 1 else [0]:
                yield [
                    f"parallelism.dp={dp}",
                    f"parallelism.tp={tp}",
                    f"parallelism.pp={pp}",
                    *(["parallelism.tp_mode=REDUCE_SCATTER"] if tp > 1 else []),
                    *(["parallelism.pp_engine=1f1b"] if pp > 1 else []),
                    f"optimizer.zero_stage={stage}",
                    *unchanged,
                    *unset,
                    *same_batch_overrides(config, dp),
                ]


def changes(config: Config, gpu: Gpu) -> Iterator[list[str]]:
    """Yield overrides that change one setting of a layout; the model may not allow some of them."""
    layout, experts = config.parallelism, config.model.decoder.experts
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
    overrides: list[str], config: Config, with_overrides: Callable[[list[str]], Config], gpu: Gpu, room: int
) -> Layout:
    """Return the fastest layout of this shape that fits into `room` bytes, or the last one tried."""
    tried = Layout(overrides, 0, None)
    for more in _ways(config):
        tried = Layout(_replaced(overrides, more), 0, None)
        changed = with_overrides(tried.overrides)
        first = plan_memory(changed, gpu, [0])[0]
        tried = tried._replace(peak=first.peak.bytes)
        if sum(first.peak.of.get(kind, 0) for kind in COLUMNS[:3]) >= room:
            break  # weights, gradients and optimizer alone do not fit
        if first.peak.bytes < room:
            others = first_ranks(changed)[1:]
            plans = [first, *(plan_memory(changed, gpu, others) if others else ())]
            peak = max(plan.peak.bytes for plan in plans)
            if peak < room:
                return Layout(tried.overrides, peak, speed_of(changed, gpu, plans))
    return tried


def _ways(config: Config) -> Iterator[Sequence[str]]:
    """Yield overrides for recomputation and micro-batches, in the order of their costs."""
    tokens, length = config.tokens, max(config.sequence_lengths.values())
    per_replica = tokens.batch_accumulation_per_replica * tokens.micro_batch_size
    enough = (TOKENS if config.parallelism.pp == 1 else TOKENS_OF_A_STAGE) // length
    large = max(size for size in (1, 2, 4, 8) if per_replica % size == 0 and size <= max(1, enough))
    for recompute in RECOMPUTED:
        for size in dict.fromkeys((large, 1)):
            yield [f"parallelism.recompute_layer={recompute}", *in_batches_of(config, size)]
