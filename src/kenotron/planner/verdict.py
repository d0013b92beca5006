"""Check whether a plan fits into memory, and find the nearest change that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kenotron.config.errors import InputError
from kenotron.planner.hardware import GIB
from kenotron.planner.memory import first_ranks, plan_memory

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.models.recomputation import Recompute
    from kenotron.planner.hardware import Gpu
    from kenotron.planner.memory import RankPlan

COLUMNS = ("weights", "gradients", "optimizer", "activations", "logits", "communication", "other")
LESS_AND_LESS_KEPT: tuple[Recompute, ...] = (False, "elementwise", "selective", True)


class Verdict(NamedTuple):
    """The bytes of the largest rank, of the memory, and of its usable part; None if unknown."""

    peak: int
    memory: int | None
    usable: int | None
    fits: bool | None


def by_column(of: Mapping[str, int]) -> list[int]:
    """Return the bytes of each of `COLUMNS`."""
    named = [of.get(column, 0) for column in COLUMNS[:-1]]
    return [*named, sum(of.values()) - sum(named)]


def usable(memory: int, gpu: Gpu | None) -> int:
    """Return the bytes to plan for: the rest is for the driver, libraries and communicators, and fragmentation.

    On a CPU fragmentation is large: glibc's allocator grew by 1.6 times the tensors of a step [measured].
    """
    return int(max((0.6 if gpu is None else 0.85) * (memory - GIB / 4), memory / 4))


def verdict_of(plans: Sequence[RankPlan], memory: int | None, gpu: Gpu | None) -> Verdict:
    """Return the verdict on ranks that have `memory` bytes each, of a GPU or of the host."""
    peak = max(plan.peak.bytes for plan in plans)
    if memory is None:
        return Verdict(peak, None, None, None)
    return Verdict(peak, memory, usable(memory, gpu), peak < usable(memory, gpu))


def in_words(verdict: Verdict) -> str:
    """Return the verdict as a line of text."""
    needs = f"the largest rank needs {verdict.peak / GIB:.3g} GiB"
    if verdict.memory is None or verdict.usable is None:
        return f"{needs[0].upper()}{needs[1:]}; the memory of this machine is unknown."
    of = f"{verdict.memory / GIB:.3g}, of which {verdict.usable / GIB:.3g} can be planned for"
    return f"{'It fits' if verdict.fits else 'It does not fit'}: {needs} of {of}."


# What to change -----------------------------------------------------------------------------------


def nearest_that_fits(
    config: Config,
    with_overrides: Callable[[list[str]], Config],
    gpu: Gpu | None,
    plans: Sequence[RankPlan],
    usable: int,
    say: Callable[[str], None],
) -> list[str] | None:
    """Return the first of `changes` with which every stage's rank needs less than `usable` bytes; None if none does.

    `with_overrides` makes a config with some overrides. `say` gets a line for every change that is tried.
    """
    largest = max(plans, key=lambda plan: plan.peak.bytes)
    states = sum(largest.peak.of.get(kind, 0) for kind in COLUMNS[:3])
    for overrides in changes(config, states < usable):
        try:
            changed = with_overrides(overrides)
        except InputError:  # the model or layout does not allow this change
            continue
        say(f"trying {' '.join(overrides)}")
        others = first_ranks(changed)
        first = [others.pop(largest.stage)]  # planned alone, because the others matter only if it fits
        if _fit(changed, gpu, first, usable) and _fit(changed, gpu, others, usable):
            return overrides
    return None


def _fit(config: Config, gpu: Gpu | None, ranks: list[int], usable: int) -> bool:
    return not ranks or all(plan.peak.bytes < usable for plan in plan_memory(config, gpu, ranks))


def changes(config: Config, states_fit: bool) -> Iterator[list[str]]:
    """Yield overrides with the same global batch, in the order of their costs; the last ones use more ranks."""
    layout, count = config.parallelism, config.tokens.batch_accumulation_per_replica
    _, *less = _ways_to_keep_less(config)
    least = less[-1] if less else []
    if states_fit:
        if layout.pp_engine == "afab" and count > layout.pp > 1:
            yield ["parallelism.pp_engine=1f1b"]
        yield from less
    for stage in range(1, 4):
        if layout.dp > 1 and config.zero_stage in range(stage):
            yield [f"optimizer.zero_stage={stage}"]
            yield [f"optimizer.zero_stage={stage}", *least]
    for times in (2, 4, 8):
        if layout.tp * times <= 8:
            yield [f"parallelism.tp={layout.tp * times}", *least]


def _ways_to_keep_less(config: Config) -> Iterator[list[str]]:
    """Yield overrides of recomputation and smaller micro-batches, from no change to the least memory."""
    current, micro = config.parallelism.recompute_layer, config.tokens.micro_batch_size
    for recompute in LESS_AND_LESS_KEPT[LESS_AND_LESS_KEPT.index(current) :]:
        more = [] if recompute == current else [f"parallelism.recompute_layer={recompute}".lower()]
        for size in range(micro, 0, -1):
            if micro % size == 0:
                yield [*in_batches_of(config, size), *more]


def in_batches_of(config: Config, size: int) -> list[str]:
    """Return overrides for micro-batches of `size` sequences and the same global batch."""
    tokens = config.tokens
    count = tokens.batch_accumulation_per_replica * tokens.micro_batch_size // size
    if size == tokens.micro_batch_size:
        return []
    return [f"tokens.micro_batch_size={size}", f"tokens.batch_accumulation_per_replica={count}"]
