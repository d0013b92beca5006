"""`kenotron plan my.yaml --gpu h100`: the memory and the time that a run will need, before anything is paid for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kenotron.cli.config import File, Overrides, to_stderr

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu
    from kenotron.planner.memory import RankPlan
    from kenotron.planner.search import Layout
    from kenotron.planner.speed import Speed
    from kenotron.planner.verdict import Verdict

SHAPE = ("dp", "tp", "pp", "zero_stage", "recompute_layer", "micro_batch_size")
UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (0, "seconds"))


def plan(
    file: File,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Plan for GPUs of this kind, such as h100; default: this machine's, or CPUs.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Plan for this rank; default: the first of every pipeline stage.")
    ] = None,
    in_machine: Annotated[
        int | None, typer.Option("--gpus-per-machine", min=1, help="Default: as such GPUs are usually sold.")
    ] = None,
    network: Annotated[
        float | None, typer.Option(min=0.01, help="GB/s that a GPU sends to other machines; default: usual ones.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank layouts of as many GPUs and the same global batch by their speed.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with memory and time as pictures to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; bytes and seconds.")] = False,
) -> None:
    """Predict memory and time of a run: its own code builds and steps its ranks, without memory and other ranks.

    Exit code 1: it does not fit.
    """
    import torch

    from kenotron.cli.tables import progress_bar
    from kenotron.config import load, refuse_unsupported
    from kenotron.config.errors import InputError, counted, os_errors
    from kenotron.interop import resolve_architecture
    from kenotron.launch.memory import free_memory
    from kenotron.planner.hardware import GIB, GPUS, gpu_called, gpu_here
    from kenotron.planner.memory import plan_memory
    from kenotron.planner.page import plan_page
    from kenotron.planner.search import search as find_layouts
    from kenotron.planner.speed import speed_of
    from kenotron.planner.verdict import nearest_that_fits, usable, verdict_of

    def changed(more: list[str]) -> Config:
        config = load(file, [*(overrides or []), *more], report=to_stderr)
        refuse_unsupported(config)
        return resolve_architecture(config)

    config = changed([])
    device = gpu_here() if gpu is None else gpu_called(gpu)
    if device is not None:
        given: dict[str, Any] = {"in_machine": in_machine, "network": network and 1e9 * network}
        device = device._replace(**{name: value for name, value in given.items() if value})
    cpu, ranks = torch.device("cpu"), config.parallelism.world_size
    memory = free_memory(cpu, ranks) if device is None else int(device.memory_gib * GIB)
    if not set(rank or ()) <= set(range(ranks)):
        raise InputError(f"--rank: expected ranks from 0 to {ranks - 1}, found {', '.join(map(str, rank or ()))}")
    if search and (rank or html):
        raise InputError("--search: expected without --rank and --html, which are for one layout")
    if search:
        if device is None or not device.flops or memory is None:
            raise InputError(f"--search: it needs a kind of GPU whose speed is known; give --gpu {' | '.join(GPUS)}")
        with progress_bar("Planning layouts") as report:
            layouts = find_layouts(config, changed, device, usable(memory, device), report)
        _print_layouts(layouts, device, ranks, as_json)
        raise typer.Exit(1 if layouts[0].speed is None else 0)
    with progress_bar("Following ranks") as report:
        plans = plan_memory(config, device, rank, report)
    verdict = verdict_of(plans, memory, device)
    speed = speed_of(config, device, plans) if device is not None and device.flops and rank is None else None
    nearest = None
    if verdict.usable is not None and not verdict.fits:
        nearest = nearest_that_fits(config, changed, device, plans, verdict.usable, to_stderr)
    if html is not None:
        lines = [] if speed is None else [_in_a_line(config, speed)]
        lines += [f"The nearest that fits: {' '.join(nearest)}"] if nearest else []
        title = f"{Path(file).stem} on {counted(ranks, 'rank')}, {device.name if device else 'CPUs'}"
        with os_errors(f"--html: cannot write {html}"):
            html.write_text(plan_page(title, verdict, lines, plans, speed), encoding="utf-8")
    if as_json:
        print(json.dumps(_as_data(plans, speed) | verdict._asdict() | {"nearest": nearest}, indent=2))
    else:
        _print(config, device, plans, verdict, nearest)
        if speed is not None:
            _print_speed(config, plans, speed)
    raise typer.Exit(1 if verdict.fits is False else 0)


def _as_data(plans: Sequence[RankPlan], speed: Speed | None) -> dict[str, Any]:
    ranks = [each._asdict() | {"peak": each.peak._asdict(), "events": len(each.events)} for each in plans]
    step = None if speed is None else speed._asdict() | {"ranks": [each._asdict() for each in speed.ranks]}
    return {"ranks": ranks, "step": step}


def _print(
    config: Config, gpu: Gpu | None, plans: Sequence[RankPlan], verdict: Verdict, nearest: list[str] | None
) -> None:
    from kenotron.cli.tables import print_table
    from kenotron.config.errors import counted
    from kenotron.planner.hardware import GIB
    from kenotron.planner.verdict import COLUMNS, by_column, in_words

    ranks = counted(config.parallelism.world_size, "rank")
    print(f"{ranks} on {gpu.name if gpu else 'CPUs'}. GiB at the peak of a step:")
    rows = []
    for each in plans:
        sizes = each.peak.bytes, *by_column(each.peak.of)
        rows.append((str(each.rank), str(each.stage), *(f"{size / GIB:.3g}" for size in sizes)))
    print_table(("rank", "stage", "sum", *COLUMNS), rows)
    largest = max(plans, key=lambda each: each.peak.bytes)
    print(f"Largest of rank {largest.rank}:")
    for kind, site, size in largest.peak.largest[:8]:
        print(f"  {size / GIB:8.3f}  {kind:14}{site}")
    print(in_words(verdict))
    if verdict.fits is False:
        print(f"The nearest that fits: {' '.join(nearest)}" if nearest else "Nothing tried fits; it takes more ranks.")


def _print_speed(config: Config, plans: Sequence[RankPlan], speed: Speed) -> None:
    from kenotron.cli.tables import print_table
    from kenotron.planner.timeline import KINDS

    print("Milliseconds of a step:")
    waits = dict.fromkeys(name for each in speed.ranks for name in each.of if name.startswith("waits"))
    columns = *KINDS.values(), *waits
    rows = []
    for plan, spent in zip(plans, speed.ranks):
        times = (f"{1000 * spent.of.get(name, 0.0):,.1f}" for name in columns)
        rows.append((str(plan.rank), str(plan.stage), f"{1000 * spent.seconds:,.1f}", *times))
    print_table(("rank", "stage", "step", *columns), rows)
    print(_in_a_line(config, speed))


def _in_a_line(config: Config, speed: Speed) -> str:
    ranks, steps = config.parallelism.world_size, config.tokens.train_steps
    long = 3600 * speed.gpu_hours / ranks
    size, unit = next((size, unit) for size, unit in UNITS if long >= size)
    return (
        f"{speed.tokens_per_second:,.0f} tokens/s, {speed.tokens_per_second / ranks:,.0f} a GPU, MFU {speed.mfu:.1%}; "
        f"{steps:,} steps: {long / max(size, 1):.3g} {unit}, {speed.gpu_hours:,.3g} GPU-hours, {speed.kwh:,.3g} kWh"
    )


def _print_layouts(layouts: Sequence[Layout], gpu: Gpu, ranks: int, as_json: bool) -> None:
    from kenotron.cli.tables import print_table
    from kenotron.config.errors import counted
    from kenotron.planner.hardware import GIB
    from kenotron.planner.search import why

    if as_json:
        for layout in layouts:
            speed = None if layout.speed is None else layout.speed._asdict() | {"ranks": None}
            print(json.dumps(layout._asdict() | {"speed": speed, "why": why(layout, layouts[0])}))
        return
    print(f"{counted(ranks, 'rank')} on {gpu.name}, the fastest first:")
    rows = []
    for layout in layouts:
        values = dict(override.rsplit(".", 1)[-1].split("=") for override in layout.overrides)
        shape = [values[name] for name in SHAPE]
        fast = ["", "", ""]
        if layout.speed is not None:
            tokens = layout.speed.tokens_per_second / ranks
            fast = [f"{1000 * layout.speed.seconds:,.0f}", f"{tokens:,.0f}", f"{layout.speed.mfu:.1%}"]
        rows.append((*shape, f"{layout.peak / GIB:.3g}", *fast, why(layout, layouts[0])))
    print_table((*SHAPE, "GiB", "ms", "tokens/s", "MFU", "beside the first"), rows)
    print(f"The first: {' '.join(layouts[0].overrides)}")
