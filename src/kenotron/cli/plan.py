"""`kenotron plan my.yaml --gpu h100`: the memory that a run will need, before anything is paid for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kenotron.cli.config import File, Overrides, to_stderr

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu
    from kenotron.planner.memory import RankMemory
    from kenotron.planner.verdict import Verdict


def plan(
    file: File,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="Plan for GPUs of this kind, such as h100; default: this machine's, or CPUs.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Plan for this rank; default: the first of every pipeline stage.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; bytes.")] = False,
) -> None:
    """Predict the memory of a run's ranks: the run's own code builds and steps them, without memory and other ranks.

    Exit code 1: it does not fit.
    """
    import torch

    from kenotron.cli.tables import progress_bar
    from kenotron.config import load, refuse_unsupported
    from kenotron.config.errors import InputError
    from kenotron.interop import resolve_architecture
    from kenotron.launch.memory import free_memory
    from kenotron.planner.hardware import GIB, gpu_called, gpu_here
    from kenotron.planner.memory import plan_memory
    from kenotron.planner.verdict import nearest_that_fits, verdict_of

    def changed(more: list[str]) -> Config:
        config = load(file, [*(overrides or []), *more], report=to_stderr)
        refuse_unsupported(config)
        return resolve_architecture(config)

    config = changed([])
    device = gpu_here() if gpu is None else gpu_called(gpu)
    cpu, ranks = torch.device("cpu"), config.parallelism.world_size
    memory = free_memory(cpu, ranks) if device is None else int(device.memory_gib * GIB)
    if not set(rank or ()) <= set(range(ranks)):
        raise InputError(f"--rank: expected ranks from 0 to {ranks - 1}, found {', '.join(map(str, rank or ()))}")
    with progress_bar("Following ranks") as report:
        plans = plan_memory(config, device, rank, report)
    verdict = verdict_of(plans, memory, device)
    nearest = None
    if verdict.usable is not None and not verdict.fits:
        nearest = nearest_that_fits(config, changed, device, plans, verdict.usable, to_stderr)
    if as_json:
        followed = [each._asdict() | {"peak": each.peak._asdict()} for each in plans]
        print(json.dumps(verdict._asdict() | {"nearest": nearest, "ranks": followed}, indent=2))
    else:
        _print(config, device, plans, verdict, nearest)
    raise typer.Exit(1 if verdict.fits is False else 0)


def _print(
    config: Config, gpu: Gpu | None, plans: Sequence[RankMemory], verdict: Verdict, nearest: list[str] | None
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
