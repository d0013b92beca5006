"""The pictures of the docs that need no long run, from the code or from a run of seconds: `make pictures` (a minute).

    python benchmarks/diagrams.py                  draws all of them into docs/pictures
    python benchmarks/diagrams.py --only mesh      one of zero, mesh, mixture, lazy, schedules, badges, plan

zero       what a rank of dp 8 holds at each `zero_stage`, at the peak of a step, as the planner predicts it
mesh       the ranks of two machines and the groups that they form, as `parallel.mesh` makes them
mixture    the samples of every step of two stages, as `data.provenance` looks them up, and the weights of the config
lazy       a checkpoint of the engine `datastates` beside the steps of a run, timed
schedules  pipeline schedules, as torch orders the work of their ranks
badges     license and versions of Python, as pyproject.toml has them
plan       the page of `kenotron plan` in Chromium, which must be installed

`pictures.py` draws those that need long runs, and has the style of all.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

from kenotron.checkpoint.durable import HashedFile
from pictures import COLOURS, QUICKSTART, ROOT, THEMES, draw_chosen, drawing, kenotron
from slow_disk import RATE, slow_file

if TYPE_CHECKING:
    from kenotron.config import Config

# torch is imported where it is used: the process that writes the checkpoint of `lazy` imports this file.

ON_COLOUR = "#0d1117"  # of text on any of COLOURS, in both themes
MIDDLE = {"ha": "center", "va": "center"}
GIB, MIB = 2**30, 2**20


def without_frame(axes: Any) -> None:
    """Leave neither spines nor ticks on `axes`."""
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


@contextmanager
def one_of(ranks: int, rank: int) -> Iterator[None]:
    """Make this process `rank` of `ranks` that are not there: torch's "fake" group forms groups, and sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- ZeRO --------------------------------------------------------------------------------------------------

LLAMA_8B = (
    "model.model_config={family: llama, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32, "
    "num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192, "
    "tie_word_embeddings: false}"
)
ADAMW = "optimizer.optimizer_factory={name: adamW, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-8}"
DP = 8
STAGES = {f"zero_stage {stage}": [f"optimizer.zero_stage={stage}"] for stage in range(4)}
STAGES["hybrid, dp_shard 4"] = ["optimizer.zero_stage=hybrid", "parallelism.dp_shard=4"]


def zero(out: Path) -> None:
    """Draw what a rank holds at every ZeRO stage."""
    import kenotron as kn

    layout = [f"parallelism.dp={DP}", "parallelism.recompute_layer=true"]
    batch = ["tokens.sequence_length=4096", "tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=2"]
    same = [LLAMA_8B, ADAMW, "model.dtype=bfloat16", *layout, *batch]
    held = {name: bytes_of_rank(kn.load(QUICKSTART, [*same, *stage])) for name, stage in STAGES.items()}
    for theme, colours in THEMES.items():
        draw_zero(held, colours, out / f"zero-{theme}.svg")


def bytes_of_rank(config: Config) -> dict[str, float]:
    """Predict what the first rank holds at the peak of a step on an H100, by kind."""
    from kenotron.planner.hardware import GPUS
    from kenotron.planner.memory import plan_memory
    from kenotron.planner.verdict import COLUMNS, by_column

    (plan,) = plan_memory(config, GPUS["h100"])
    return dict(zip(COLUMNS, by_column(plan.peak.of), strict=True))


def draw_zero(held: dict[str, dict[str, float]], colours: dict[str, str], file: Path) -> None:
    """Draw one theme of the picture: a bar for each stage, of one piece for each part."""
    with drawing(file, colours, (10, 3.8)) as figure:
        axes, bars = figure.subplots(), range(len(held))
        ends = [0.0] * len(held)
        for number, part in enumerate(next(iter(held.values()))):
            widths = [bytes_[part] / GIB for bytes_ in held.values()]
            axes.barh(bars, widths, 0.7, ends, color=COLOURS[number], label=part, edgecolor=colours["paper"])
            for bar, end, width in zip(bars, ends, widths):
                if width > 1:
                    size = 7.5 if width < 5 else 10
                    axes.text(end + width / 2, bar, f"{width:.1f}", color=ON_COLOUR, fontsize=size, **MIDDLE)
            ends = [end + width for end, width in zip(ends, widths)]
        for bar, end in zip(bars, ends):
            axes.text(end + 1, bar, f"{end:.1f} GiB", va="center", weight="bold")
        axes.set_title(f"Llama 3.1 8B in bf16, dp {DP}, 4096 tokens, recomputed: GiB on a rank at the peak of a step")
        axes.set_yticks(bars, held)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1 * max(ends))
        axes.tick_params(labelbottom=False)
        without_frame(axes)
        figure.legend(loc="outside lower left", ncols=4, frameon=False, labelcolor=colours["quiet"])


# ---- the mesh ----------------------------------------------------------------------------------------------

NODES, RANKS_PER_NODE = 2, 8
LAYOUT = [f"parallelism.{key}=2" for key in ("pp", "dp", "context_parallel_size", "tp")]
Groups = dict[str, set[tuple[int, ...]]]


def mesh(out: Path) -> None:
    """Draw where every rank of a layout stands, and the groups that the ranks form."""
    import kenotron as kn

    config = kn.load(QUICKSTART, [*LAYOUT, "optimizer.zero_stage=1"])
    places, groups = ranks_and_groups(config, RANKS_PER_NODE)
    for theme, colours in THEMES.items():
        draw_mesh(places, groups, colours, out / f"mesh-{theme}.svg")


def ranks_and_groups(config: Config, ranks_on_machine: int) -> tuple[list[dict[str, int]], Groups]:
    """Ask every rank for its place along the axes larger than 1, and for its group of each name."""
    import torch.distributed as dist

    from kenotron.parallel.mesh import GROUPS, NAMES, axes, build_mesh

    ranks, places, groups = config.parallelism.world_size, list[dict[str, int]](), Groups()
    for rank in range(ranks):
        with one_of(ranks, rank):
            of_rank = build_mesh(axes(config, ranks_on_machine), ranks, "cpu")
            places.append({axis: of_rank.rank(axis) for axis in of_rank.larger("world")})
            for name in (*NAMES, *GROUPS):
                if (group := of_rank.group(name)) is not None:
                    groups.setdefault(name, set()).add(tuple(dist.get_process_group_ranks(group)))
    return places, groups


def draw_mesh(places: list[dict[str, int]], groups: Groups, colours: dict[str, str], file: Path) -> None:
    """Draw one theme of the picture: the ranks above, below them a panel for all names of the same groups."""
    names: dict[frozenset[tuple[int, ...]], list[str]] = {}
    for name, found in groups.items():
        names.setdefault(frozenset(found), []).append(name if name in places[0] else f'"{name}"')
    with drawing(file, colours, (10, 6.8)) as figure:
        figure.get_layout_engine().set(hspace=0.06)
        rows = -(-len(names) // 4)
        grid = figure.add_gridspec(1 + rows, 4, height_ratios=(1.9, *[1] * rows))
        top = figure.add_subplot(grid[0, :])
        draw_ranks(top, [colours["grid"]] * len(places), colours["ink"], places)
        top.set_title(f"{NODES} machines of {RANKS_PER_NODE} ranks: " + " x ".join(f"{axis} 2" for axis in places[0]))
        for number, (found, titles) in enumerate(names.items()):
            axes = figure.add_subplot(grid[1 + number // 4, number % 4])
            group_of = {rank: index for index, group in enumerate(sorted(found)) for rank in group}
            draw_ranks(axes, [COLOURS[group_of[rank]] for rank in range(len(places))], ON_COLOUR)
            count = f"{len(found)} groups" if len(found) > 1 else "1 group"
            axes.set_title(f"{' = '.join(titles)}: {count} of {len(next(iter(found)))}", fontsize=9)


def draw_ranks(axes: Any, fills: list[str], ink: str, places: list[dict[str, int]] | None = None) -> None:
    """Draw a square for each rank in the colour of `fills`, and its place in it; a machine is two rows of squares."""
    from matplotlib.patches import Rectangle

    columns = RANKS_PER_NODE // 2
    for rank, fill in enumerate(fills):
        node, within = divmod(rank, RANKS_PER_NODE)
        x, y = within % columns + node * (columns + 0.3), within // columns
        axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, color=fill, linewidth=0))
        middle = {"color": ink, **MIDDLE}
        if places is None:
            axes.text(x + 0.5, y + 0.5, rank, fontsize=8, **middle)
            continue
        axes.text(x + 0.5, y + 0.32, f"rank {rank}", weight="bold", **middle)
        lines = [f"{axis} {number}" for axis, number in places[rank].items()]
        axes.text(x + 0.5, y + 0.66, f"{', '.join(lines[:2])}\n{', '.join(lines[2:])}", fontsize=8, **middle)
    if places is not None:
        for node in range(NODES):
            axes.text(node * (columns + 0.3) + columns / 2, 2.2, f"machine {node}", **MIDDLE)
    height = 2 if places is None else 2.35
    axes.set(xlim=(0, NODES * (columns + 0.3) - 0.3), ylim=(height, 0), xticks=[], yticks=[])
    without_frame(axes)


# ---- mixtures ----------------------------------------------------------------------------------------------

BATCH, LENGTH = 32, 8  # samples of a step, tokens of a sample
MIXTURES: dict[str, tuple[int, dict[str, int]]] = {  # steps and weights of each stage
    "broad": (60, {"web": 7, "books": 2, "code": 1}),
    "code": (30, {"web": 3, "books": 2, "code": 5}),
}


def mixture(out: Path) -> None:
    """Draw which dataset the samples of each step come from."""
    with tempfile.TemporaryDirectory() as folder:
        found = samples_of_steps(Path(folder))
    for theme, colours in THEMES.items():
        draw_mixture(found, colours, out / f"mixture-{theme}.svg")


def samples_of_steps(folder: Path) -> list[Counter[str]]:
    """Count the samples of each dataset in each step of a run, by its own order of the data; no step is trained."""
    import kenotron as kn
    from kenotron.data import open_run
    from kenotron.data.provenance import step_origins

    stages, steps = [], 0
    for name, (length, weights) in MIXTURES.items():
        parts = ", ".join(f"{{weight: {weight}, tokens: {folder / each}.npy}}" for each, weight in weights.items())
        data = f"data: {{dataset: {{mixture: [{parts}]}}}}"
        stages.append(f"{{name: {name}, start_training_step: {steps + 1}, {data}}}")
        steps += length
        for each in weights:
            np.save(folder / f"{each}.npy", np.zeros(1000 * LENGTH + 1, np.uint16))
    overrides = [f"data_stages=[{', '.join(stages)}]", "tokenizer=null", f"tokens.sequence_length={LENGTH}"]
    sizes = [f"tokens.train_steps={steps}", f"tokens.micro_batch_size={BATCH}", "tokens.val_check_interval=-1"]
    with open_run(kn.load(QUICKSTART, [*overrides, *sizes]), report=lambda line: None) as data:
        origins = [step_origins(data, step) for step in range(1, steps + 1)]
    return [Counter(Path(origin.source).stem for origin in of_step) for of_step in origins]


def draw_mixture(found: list[Counter[str]], colours: dict[str, str], file: Path) -> None:
    """Draw one theme of the picture: a column of samples for each step, and dashes where the weights have borders."""
    with drawing(file, colours, (10, 3.8)) as figure:
        axes, steps = figure.subplots(), np.arange(1, len(found) + 1)
        below = np.zeros(len(found))
        for number, name in enumerate(next(iter(MIXTURES.values()))[1]):
            share = np.array([100 * step[name] / step.total() for step in found])
            axes.bar(steps, share, 1.0, below, color=COLOURS[number], linewidth=0)
            below += share
        begin = 0
        for stage, (length, weights) in MIXTURES.items():
            counted = sum(found[begin : begin + length], Counter[str]())
            border = 0.0
            for name, weight in weights.items():
                exact = 100 * weight / sum(weights.values())
                said = f"{name}: weight {weight}, {exact:.0f}%; counted {counted[name] / counted.total():.2%}"
                axes.text(begin + length / 2 + 0.5, border + exact / 2, said, color=ON_COLOUR, **MIDDLE)
                border += exact
                if border < 99:
                    axes.hlines(border, begin + 0.5, begin + length + 0.5, ON_COLOUR, (0, (4, 3)), linewidth=1.2)
            axes.text(begin + length / 2 + 0.5, 103, f"stage {stage}, {counted.total():,} samples", ha="center")
            begin += length
            if begin < len(found):
                axes.axvline(begin + 0.5, color=colours["paper"], linewidth=3)
        axes.set_xlim(0.5, len(found) + 0.5)
        axes.set_ylim(0, 100)
        axes.set_xlabel("step")
        axes.set_ylabel(f"% of a step's {BATCH} samples")
        axes.set_title("Samples of every step (columns) and weights of the config (dashes)", pad=22)
        without_frame(axes)


# ---- a lazy checkpoint -------------------------------------------------------------------------------------

TIMES = "KENOTRON_DIAGRAM_TIMES"  # names the file to which all processes append their times
EVERY = 4  # steps between two saves
DISK = 150e6  # bytes a second: writing takes some steps
LAZY = [
    "model.model_config={family: llama, hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 4, "
    "num_attention_heads: 8, num_key_value_heads: 8, vocab_size: 8192, max_position_embeddings: 512}",
    "tokens.sequence_length=512",
    "tokens.micro_batch_size=1",
]


class Span(NamedTuple):
    """What was done from `start` to `end`, in seconds of the machine's clock."""

    what: str
    start: float
    end: float


def record(what: str, start: float, end: float) -> None:
    """Append a span to the file; also from the process that writes the checkpoint."""
    with Path(os.environ[TIMES]).open("a") as file:
        file.write(f"{what} {start!r} {end!r}\n")


def timed(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, but with its calls recorded."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        start = time.monotonic()
        result = function(*arguments, **options)
        record(what, start, time.monotonic())
        return result

    return called


def timed_file(path: Path, size: int) -> HashedFile:
    """Open a file of a slow disk whose writes are recorded: `checkpoints.writer` names this function."""
    file = slow_file(path, size)
    vars(file)["write"] = timed("write", file.write)
    return file


def lazy(out: Path) -> None:
    """Draw the second checkpoint of a run: at the first one the engine also makes its plan and its memory."""
    import torch

    torch.set_num_threads(1)  # leaves a core to the writer
    with tempfile.TemporaryDirectory() as folder:
        spans, size = times_of_run(Path(folder), LAZY, DISK)
    for theme, colours in THEMES.items():
        draw_lazy(spans, size, colours, out / f"lazy-{theme}.svg")


def times_of_run(folder: Path, overrides: list[str], disk: float) -> tuple[list[Span], int]:
    """Train in `folder` with three saves; return what was done when, and the bytes of a checkpoint.

    The functions of the run are wrapped; `published` is when the writer has renamed the checkpoint's folder.
    """
    import torch

    import kenotron as kn
    from kenotron.checkpoint.engines.background import DataStatesEngine
    from kenotron.checkpoint.engines.staging import Copier
    from kenotron.models.decoder import Decoder
    from kenotron.training import step

    sizes, collect = [], DataStatesEngine.collect

    def collected(engine: DataStatesEngine) -> Any:
        outcomes = collect(engine)
        for outcome in outcomes:
            sizes.append(outcome.bytes)
            record("published", engine.started, engine.started + outcome.seconds)
            record("logged", engine.started, time.monotonic())
        return outcomes

    watched = [("forward", Decoder, "forward"), ("backward", torch.Tensor, "backward"), ("update", step, "_update")]
    watched += [("save", DataStatesEngine, "save"), ("fence", DataStatesEngine, "fence")]
    watched += [("copy", Copier, "_copy_block")]
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, {TIMES: str(folder / "times"), RATE: str(disk)}))
        for what, owner, name in watched:
            patches.enter_context(mock.patch.object(owner, name, timed(what, getattr(owner, name))))
        patches.enter_context(mock.patch.object(DataStatesEngine, "collect", collected))
        kn.train(kn.load(QUICKSTART, [*overrides, *settings_of_run(folder)]))
    lines = [line.split() for line in (folder / "times").read_text().splitlines()]
    return [Span(what, float(start), float(end)) for what, start, end in lines], sizes[-1]


def settings_of_run(folder: Path) -> list[str]:
    """Return overrides: the lazy engine saves every `EVERY` steps of a run on random tokens."""
    saves = f"checkpoint_interval: {EVERY}, checkpointing_engine: datastates, writer: diagrams.timed_file"
    return [
        "data_stages=[{name: random, start_training_step: 1, data: {dataset: null}}]",
        "tokenizer=null",
        ADAMW,
        "optimizer.learning_rate_scheduler={learning_rate: 0.001, lr_warmup_steps: 0, lr_decay_style: constant}",
        f"tokens.train_steps={3 * EVERY}",
        "tokens.val_check_interval=-1",
        f"checkpoints={{checkpoints_path: {folder / 'checkpoints'}, {saves}}}",
        f"logging={{log_dir: {folder / 'logs'}, tensorboard: false}}",
    ]


def second_save(spans: list[Span]) -> dict[str, list[Span]]:
    """Select what was done from the second save's call to the third's, or its own end; in seconds from the call on."""
    first, third = sorted(span.start for span in spans if span.what == "save")[1:]
    last = max(third, next(span.end for span in spans if span.what == "published" and span.start >= first))
    found: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if first <= span.start < last:
            found.setdefault(span.what, []).append(Span(span.what, span.start - first, span.end - first))
    return found


def draw_lazy(spans: list[Span], size: int, colours: dict[str, str], file: Path) -> None:
    """Draw one theme of the picture: the training process, its copies and the writer, each on a line."""
    found = second_save(spans)
    fence = next(span for span in found["fence"] if span.start > found["backward"][0].end)
    call, published, logged = found["save"][0], found["published"][0].end, found["logged"][0].end
    commit = Span("commit", found["write"][-1].end, published)
    rows = [
        ("training", found["forward"], 3, "forward"),
        ("training", found["backward"], 2, "backward"),
        ("training", [Span("update", fence.end, found["update"][0].end), *found["update"][1:]], 1, "update"),
        ("copies to host memory", found["copy"], 0, "copy of a block"),
        ("writer process", found["write"], 4, "write"),
        ("writer process", [commit], 5, "commit: sync, manifest, rename"),
    ]
    labels = list(dict.fromkeys(row for row, *_ in rows))
    with drawing(file, colours, (10, 3.6)) as figure:
        axes = figure.subplots()
        for row, done, colour, label in rows:
            pieces = [(span.start, span.end - span.start) for span in done]
            axes.broken_barh(pieces, (labels.index(row) - 0.35, 0.7), color=COLOURS[colour], label=label)
        moments = {
            0.0: f"save(): {1000 * call.end:.0f} ms",
            fence.start: f"fence: waits {1000 * (fence.end - fence.start):.1f} ms",
            published: "published",
            logged: "logged",
        }
        for number, (at, said) in enumerate(sorted(moments.items())):  # neighbours at two heights
            axes.axvline(at, color=colours["quiet"], linewidth=1, linestyle=(0, (4, 3)))
            axes.annotate(said, (at, -0.5), (3, 2 + 12 * (number % 2)), textcoords="offset points", fontsize=9)
        written = f"A checkpoint of {size / MIB:.0f} MiB, written at {DISK / 1e6:.0f} MB/s"
        axes.set_title(f"{written}, beside the steps of a run on one CPU core", pad=28)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlim(0, next((span.end for span in found["update"] if span.start > logged), logged))
        axes.set_xlabel("seconds since the call of save()")
        without_frame(axes)
        figure.legend(loc="outside lower left", ncols=6, frameon=False, labelcolor=colours["quiet"])


# ---- pipeline schedules ------------------------------------------------------------------------------------

RANKS, MICRO_BATCHES = 4, 8
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # backward is twice the work: of inputs and of weights
KINDS = {
    "F": ("#2e86ab", "forward"),
    "B": ("#66a182", "backward"),
    "I": ("#66a182", ""),
    "W": ("#edae49", "weights alone"),
}


def schedules(out: Path) -> None:
    """Draw what every rank does when, by the schedules that `parallelism.pp_engine` names."""
    from kenotron.parallel.pipeline import SCHEDULES

    orders = {name: order_of(SCHEDULES[name]) for name in ("afab", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")}
    for theme, colours in THEMES.items():
        draw_schedules(orders, colours, out / f"schedules-{theme}.svg")


Work = tuple[int, float, float, str, int, int]
"""Rank, start, length, kind of work, micro-batch, chunk of the rank's layers."""


def one_part(rank: int, warm_up: int) -> list[tuple[int, str, int]]:
    """List stage, kind and micro-batch where a rank has one part, as torch does: in turn after `warm_up` forwards."""
    forwards = [(rank, "F", number) for number in range(MICRO_BATCHES)]
    backwards = [(rank, "B", number) for number in range(MICRO_BATCHES)]
    steady = [work for pair in zip(backwards, forwards[warm_up:]) for work in pair]
    return forwards[:warm_up] + steady + backwards[MICRO_BATCHES - warm_up :]


def order_of(schedule: type) -> list[Work]:
    """Return the work of all ranks, each piece as early as its rank and what it waits for allow."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    chunks = 2 if issubclass(schedule, PipelineScheduleMulti) else 1
    if chunks == 1:
        warm_ups = [MICRO_BATCHES if schedule.__name__ == "ScheduleGPipe" else RANKS - rank for rank in range(RANKS)]
        rows = [one_part(rank, warm_up) for rank, warm_up in enumerate(warm_ups)]
    else:
        found = [map(repr, row) for row in get_schedule_ops(schedule, RANKS, MICRO_BATCHES, chunks)]
        parts = [[re.fullmatch(r"(\d+)([FBIW])(\d+)", each) for each in row] for row in found]
        rows = [[(int(each[1]), each[2], int(each[3])) for each in row if each] for row in parts]
    last = RANKS * chunks - 1
    done: dict[tuple[int, str, int], float] = {}
    free, spans = [0.0] * RANKS, list[Work]()
    while any(rows):
        before = len(spans)
        for rank, row in enumerate(rows):
            while row:
                stage, kind, micro_batch = row[0]
                needs = [(stage, "F", micro_batch)] if kind in "BI" else []
                if kind == "F" and stage > 0:
                    needs = [(stage - 1, "F", micro_batch)]
                elif kind in "BI" and stage < last:
                    needs.append((stage + 1, "I", micro_batch))
                if not all(need in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                length = COSTS[kind] / chunks
                free[rank] = start + length
                done[stage, "I" if kind in "BI" else kind, micro_batch] = free[rank]
                spans.append((rank, start, length, kind, micro_batch, stage // RANKS))
                row.pop(0)
        assert len(spans) > before, "every rank waits for another"
    return spans


def draw_schedules(orders: dict[str, list[Work]], colours: dict[str, str], file: Path) -> None:
    """Draw one theme of the picture: a panel for each schedule."""
    ideal = 3 * MICRO_BATCHES
    longest = max(start + length for spans in orders.values() for _, start, length, *_ in spans)
    with drawing(file, colours, (10, 6.4)) as figure:
        for axes, (name, spans) in zip(figure.subplots(len(orders), 1, sharex=True), orders.items()):
            end = max(start + length for _, start, length, *_ in spans)
            for rank, start, length, kind, micro_batch, chunk in spans:
                look = {"color": KINDS[kind][0], "alpha": 0.6 if chunk else 1.0, "edgecolor": colours["paper"]}
                axes.barh(rank, length, 0.86, start, **look)
                if length >= 1:
                    ink = colours["ink"] if chunk else ON_COLOUR
                    axes.text(start + length / 2, rank, micro_batch, fontsize=8, color=ink, **MIDDLE)
            axes.set_title(f"{name}: {1 - ideal / end:.0%} of the time is waiting")
            axes.set_xlim(0, longest)
            axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
            axes.invert_yaxis()
            axes.tick_params(labelbottom=False)
            without_frame(axes)
        from matplotlib.patches import Patch

        shown = [Patch(color=colour, label=label) for colour, label in KINDS.values() if label]
        shown.append(Patch(color="#2e86ab", alpha=0.6, label="fainter: the rank's second part of the layers"))
        figure.legend(handles=shown, loc="outside lower left", ncols=4, frameon=False, labelcolor=colours["quiet"])


# ---- badges ------------------------------------------------------------------------------------------------


def badges(out: Path) -> None:
    """Draw license and Python versions, as pyproject.toml has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: \d", each)]
    for name, value in {"license": project["license"], "python": f"{versions[0]} to {versions[-1]}"}.items():
        (out / f"{name}.svg").write_text(badge(name, value))
        print(f"wrote {out / name}.svg")


def badge(name: str, value: str) -> str:
    """Make an SVG of two fields, grey and blue."""
    left, right = 12 + 7 * len(name), 12 + 7 * len(value)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">
<title>{name}: {value}</title>
<rect width="{left + right}" height="20" rx="3" fill="#555"/>
<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z" fill="#0b62a8"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{left / 2}" y="14">{name}</text><text x="{left + right / 2}" y="14">{value}</text>
</g>
</svg>
"""


# ---- plan --------------------------------------------------------------------------------------------------

PLANNED = "parallelism.dp=2 parallelism.pp=4 parallelism.pp_engine=1f1b parallelism.recompute_layer=selective"


def plan(out: Path) -> None:
    """Draw the page of four pipeline stages, as a browser shows it, without the memory of three."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("plan: skipped, no Chromium here")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        more = ("optimizer.zero_stage=1", "tokens.batch_accumulation_per_replica=16", "--gpu", "h100", "--html", page)
        kenotron("plan", "examples/models/llama-3.1-8b.yaml", *PLANNED.split(), *map(str, more), folder=ROOT)
        page.write_text(page.read_text().replace("plan.ranks.map(memory)", "plan.ranks.slice(0, 1).map(memory)"))
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user")
        shot = f"--screenshot={out / 'plan.png'}"
        command = [browser, *options, "--window-size=1240,836", shot, page.as_uri()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        print(f"wrote {out / 'plan.png'}")


DRAWN = {draw.__name__: draw for draw in (zero, mesh, mixture, lazy, schedules, badges, plan)}


def main() -> None:
    """Draw what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    draw_chosen(parser, DRAWN)


if __name__ == "__main__":
    main()
