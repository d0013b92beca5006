"""The complete plan of a run: the memory of its ranks, whether it fits, the nearest change that does, and the speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, NamedTuple

from kenotron.config.errors import counted, human_format
from kenotron.planner.hardware import GIB
from kenotron.planner.memory import RankPlan, plan_memory
from kenotron.planner.speed import Speed, speed_of
from kenotron.planner.verdict import Verdict, nearest_that_fits, verdict_of

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu

UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (0, "seconds"))


class RunPlan(NamedTuple):
    """The plan of a config on `gpu` (None: on CPUs).

    `saved` are the bytes of a checkpoint; None if not all stages were planned. `speed` is None if times are unknown, as
    for updates on the host. `nearest` are the overrides of the nearest change that fits; None if the plan fits already,
    or no change that was tried fits.
    """

    config: Config
    gpu: Gpu | None
    ranks: list[RankPlan]
    verdict: Verdict
    saved: int | None
    speed: Speed | None
    nearest: list[str] | None


def plan_run(
    config: Config,
    with_overrides: Callable[[list[str]], Config],
    gpu: Gpu | None,
    memory: int | None,
    ranks: Sequence[int] | None = None,
    report: Callable[..., None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> RunPlan:
    """Plan `ranks` with `memory` bytes each, by default the first of every pipeline stage.

    If they do not fit, configs `with_overrides` are tried, and `say` gets a line for each. `report` and errors are
    those of `plan_memory`.
    """
    plans = plan_memory(config, gpu, ranks, report)
    verdict = verdict_of(plans, memory, gpu)
    saved = sum(reduce(or_, (plan.saved for plan in plans)).values()) if ranks is None else None
    speed, nearest = None, None
    if gpu is not None and gpu.flops and ranks is None and not config.parallelism.cpu_offload:
        speed = speed_of(config, gpu, plans)
    if verdict.usable is not None and not verdict.fits:
        nearest = nearest_that_fits(config, with_overrides, gpu, plans, verdict.usable, say)
    return RunPlan(config, gpu, plans, verdict, saved, speed, nearest)


def headline(config: Config, gpu: Gpu | None) -> str:
    """Return the number of ranks and their device, as ``8 ranks on h100``."""
    return f"{counted(config.parallelism.world_size, 'rank')} on {gpu.name if gpu else 'CPUs'}"


def saved_in_words(saved: int) -> str:
    """Return a line with the size of a checkpoint."""
    return f"A checkpoint has {saved / GIB:.3g} GiB: weights and the optimizer's state."


def speed_in_words(config: Config, speed: Speed) -> str:
    """Return a line with the speed and the time of all steps."""
    ranks, steps = config.parallelism.world_size, config.tokens.train_steps
    seconds = 3600 * speed.gpu_hours / ranks
    size, unit = next((size, unit) for size, unit in UNITS if seconds >= size)
    return (
        f"{speed.tokens_per_second:,.0f} tokens/s, {speed.of_a_gpu:,.0f} a GPU, MFU {speed.mfu:.1%}; "
        f"{counted(steps, 'step')}, {human_format(speed.tokens)} tokens: {seconds / max(size, 1):.3g} {unit}, "
        f"{_rounded(speed.gpu_hours)} GPU-hours"
        + (f", {_rounded(speed.kwh)} kWh" if speed.kwh else "")
        + (f", which cost {speed.cost:,.0f}" if speed.cost else "")
    )


def _rounded(number: float) -> str:
    """Format with three significant digits: ``13,500``, ``0.0175``."""
    return f"{float(f'{number:.3g}'):,.15g}"
