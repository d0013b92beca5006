"""`kenotron plan my.yaml --gpu h100`: predict the memory and the time of a run before it is paid for."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kenotron.cli.config import File, Overrides
from kenotron.cli.tables import print_table, progress_bar, to_stderr
from kenotron.config.errors import InputError, counted, os_errors

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.planner.hardware import Gpu
    from kenotron.planner.planning import RunPlan
    from kenotron.planner.search import Layout
    from kenotron.planner.speed import Speed


def plan(
    file: File,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Plan for GPUs of this kind, such as h100, or of a file; default: this machine's, or CPUs."),
    ] = None,
    measure: Annotated[
        Path | None, typer.Option(help="First measure this machine's GPUs, into this file for --gpu; plan for them.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(help="Plan for this rank; default: the first of every pipeline stage.")
    ] = None,
    in_machine: Annotated[
        int | None, typer.Option("--gpus-per-machine", min=1, help="Default: the usual number for such GPUs.")
    ] = None,
    network: Annotated[
        float | None, typer.Option(min=0.01, help="GB/s that a GPU sends to other machines; default: the usual rate.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Of a GPU for an hour, to see what the run costs.")] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Rank layouts of as many GPUs and the same global batch by their speed.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Explain what memory and time consist of, and how to reduce each part.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with memory and time as pictures to this file.")
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page on which the YAML and its layout can be changed.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of --serve; 0: any free port; default: 8420.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; bytes and seconds.")] = False,
) -> None:
    """Predict memory and time of a run: its own code builds and steps ranks, without real memory or other ranks.

    Exit code 1: it does not fit.
    """

    def changed(more: list[str]) -> Config:
        return _load_resolved(file, [*(overrides or []), *more], lambda line: None)

    config = _load_resolved(file, overrides or [], to_stderr)
    # They import torch, for seconds: what is wrong with a config is said before.
    from kenotron.planner.explaining import explained
    from kenotron.planner.page import page_data, page_of
    from kenotron.planner.planning import plan_run
    from kenotron.planner.search import search as find_layouts

    if measure is not None:
        gpu = _measure(measure, gpu)
    cluster: dict[str, Any] = {"in_machine": in_machine, "network": network and 1e9 * network, "price": price}
    device = _device(gpu, cluster)
    ranks, memory = config.parallelism.world_size, _memory(config, device)
    if not set(rank or ()) <= set(range(ranks)):
        raise InputError(f"--rank: expected ranks from 0 to {ranks - 1}, found {', '.join(map(str, rank or ()))}")
    if device is None and any(cluster.values()) and not serve:
        raise InputError("--gpus-per-machine, --network, --price: expected --gpu beside them: no time is known of CPUs")
    if search and (serve or rank or html):
        raise InputError("--search: expected without --serve, --rank and --html, which are for one layout")
    if port is not None and not serve:
        raise InputError("--port: expected --serve beside it")
    if serve and (rank or html or as_json):
        raise InputError("--serve: expected without --rank, --html and --json: the page has its own fields")
    if explain and (search or serve or as_json):
        raise InputError("--explain: expected without --search, --serve and --json: it is for people, of one layout")
    if serve:
        _serve(file, overrides or [], gpu, lambda kind: _device(kind, cluster), 8420 if port is None else port)
        return
    if search:
        with progress_bar("Planning layouts") as report:
            layouts = find_layouts(config, changed, device, report)
        _print_layouts(layouts, device.name if device else "", ranks, as_json)
        raise typer.Exit(1 if layouts[0].speed is None else 0)
    if html is not None:
        _check_writable("--html", html)
    with progress_bar("Following ranks") as report:
        planned = plan_run(config, changed, device, memory, rank, report, to_stderr)
    if html is not None:
        html.write_text(page_of(page_data(planned, Path(file).stem)), encoding="utf-8")
    if as_json:
        print(json.dumps(_to_json(planned), indent=2))
    else:
        _print(planned)
    if explain:
        print(*explained(planned), sep="\n")
    raise typer.Exit(1 if planned.verdict.fits is False else 0)


def _load_resolved(file: str, overrides: list[str], say: Callable[[str], None]) -> Config:
    from kenotron.config import load, refuse_unsupported

    config = load(file, overrides, report=say)
    refuse_unsupported(config)
    from kenotron.interop import resolve_architecture

    return resolve_architecture(config)


def _device(gpu: str | None, cluster: dict[str, Any]) -> Gpu | None:
    """Return the GPU to plan for, with fields of the `cluster` that are not None or 0, or None for CPUs."""
    from kenotron.planner.hardware import gpu_called, gpu_here

    device = gpu_here() if gpu is None else gpu_called(gpu)
    return device and device._replace(**{name: value for name, value in cluster.items() if value})


def _measure(path: Path, gpu: str | None) -> str:
    """Measure the GPUs of this machine, write the rates to the file `path`, and return `path` as a value for --gpu."""
    import torch

    from kenotron.planner.hardware import gpu_here
    from kenotron.planner.measuring import measure, write_gpu

    if gpu is not None or path.suffix != ".yaml" or (here := gpu_here()) is None:
        raise InputError(f"--measure: expected a machine with a GPU, a .yaml file, and no --gpu; found {path}")
    _check_writable("--measure", path)
    with progress_bar("Measuring") as report:
        write_gpu(path, measure(here, torch.device("cuda", 0), report, torch.cuda.device_count()))
    return str(path)


def _check_writable(option: str, path: Path) -> None:
    """Raise InputError before minutes of work if their file cannot be written."""
    with os_errors(f"{option}: cannot write {path}"), path.open("a"):
        pass


def _memory(config: Config, gpu: Gpu | None) -> int | None:
    """Return the memory of a rank in bytes, or None if it is unknown."""
    import torch

    from kenotron.launch.memory import free_memory
    from kenotron.planner.hardware import GIB

    if gpu is not None:
        return int(gpu.memory_gib * GIB)
    return free_memory(torch.device("cpu"), config.parallelism.world_size)


def _serve(
    file: str, overrides: list[str], gpu: str | None, device: Callable[[str | None], Gpu | None], port: int
) -> None:
    from kenotron.planner.planning import plan_run
    from kenotron.planner.search import search
    from kenotron.planner.serving import PageServer, serve

    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / Path(file).name

        def opened(
            text: str, kind: str | None, more: Sequence[str]
        ) -> tuple[Config, Callable[[list[str]], Config], Gpu | None]:
            def changed(others: list[str]) -> Config:
                return _load_resolved(str(temporary), [*overrides, *more, *others], lambda line: None)

            temporary.write_text(text, encoding="utf-8")
            try:
                return changed([]), changed, device(kind)
            except InputError as error:
                raise InputError(str(error).replace(f"{folder}/", "")) from None

        def planned(text: str, kind: str | None, more: Sequence[str]) -> RunPlan:
            config, changed, gpu = opened(text, kind, more)
            return plan_run(config, changed, gpu, _memory(config, gpu))

        def ranked(text: str, kind: str | None, more: Sequence[str], report: Callable[..., None]) -> list[Layout]:
            return search(*opened(text, kind, more), report)

        yaml = Path(file).read_text(encoding="utf-8")
        serve(PageServer(port, Path(file).stem, yaml, gpu, planned, ranked))


def _to_json(plan: RunPlan) -> dict[str, Any]:
    ranks = [
        rank._asdict() | {"peak": rank.peak._asdict(), "events": len(rank.events), "saved": sum(rank.saved.values())}
        for rank in plan.ranks
    ]
    speed = plan.speed
    step = None if speed is None else speed._asdict() | {"ranks": [rank._asdict() for rank in speed.ranks]}
    return {"ranks": ranks, "step": step} | plan.verdict._asdict() | {"nearest": plan.nearest, "saved": plan.saved}


def _print(plan: RunPlan) -> None:
    from kenotron.planner.hardware import GIB
    from kenotron.planner.planning import headline, saved_in_words
    from kenotron.planner.verdict import COLUMNS, by_column, in_words

    print(f"{headline(plan.config, plan.gpu)}. GiB at the peak of a step:")
    rows = []
    for rank in plan.ranks:
        sizes = rank.peak.bytes, *by_column(rank.peak.of)
        rows.append((str(rank.rank), str(rank.stage), *(f"{round(size / GIB, 3):.3g}" for size in sizes)))
    print_table(("rank", "stage", "sum", *COLUMNS), rows)
    largest = max(plan.ranks, key=lambda rank: rank.peak.bytes)
    print(f"Largest of rank {largest.rank}:")
    for kind, site, size in largest.peak.largest[:8]:
        print(f"  {size / GIB:8.3f}  {kind:14}{site}")
    print(in_words(plan.verdict))
    if plan.verdict.fits is False:
        nearest = plan.nearest
        print(f"The nearest that fits: {' '.join(nearest)}" if nearest else "Nothing tried fits; it takes more ranks.")
    if plan.saved is not None:
        print(saved_in_words(plan.saved))
    if plan.speed is not None:
        _print_speed(plan, plan.speed)
    elif plan.config.parallelism.cpu_offload:
        print("No time is known with parallelism.cpu_offload: of updates on the host, and of copies to and from it.")


def _print_speed(plan: RunPlan, speed: Speed) -> None:
    from kenotron.planner.planning import speed_in_words
    from kenotron.planner.timeline import KINDS

    print("Milliseconds of a step:")
    waits = dict.fromkeys(name for times in speed.ranks for name in times.of if name.startswith("waits"))
    columns = *KINDS.values(), *waits
    rows = []
    for rank, spent in zip(plan.ranks, speed.ranks):
        cells = (f"{1000 * spent.of.get(name, 0.0):,.1f}" for name in columns)
        rows.append((str(rank.rank), str(rank.stage), f"{1000 * spent.seconds:,.1f}", *cells))
    print_table(("rank", "stage", "step", *columns), rows)
    print(speed_in_words(plan.config, speed))


def _print_layouts(layouts: Sequence[Layout], gpu: str, ranks: int, as_json: bool) -> None:
    from kenotron.planner.search import table, why

    if as_json:
        for layout in layouts:
            speed = None if layout.speed is None else layout.speed._asdict() | {"ranks": None}
            print(json.dumps(layout._asdict() | {"speed": speed, "why": why(layout, layouts[0])}))
        return
    print(f"{counted(ranks, 'rank')} on {gpu}, the fastest first:")
    print_table(*table(layouts))
    print(f"The first: {' '.join(layouts[0].overrides)}")
