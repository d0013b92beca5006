"""What does a checkpoint cost training? Every engine, and torch.distributed.checkpoint.save, beside the same steps.

    taskset -c 0,1 python benchmarks/checkpoint_engines.py              # 21 M parameters, one thread of two cores
    python benchmarks/checkpoint_engines.py --hidden 1024 --layers 6 --tokens 1024 --rounds 3
    python benchmarks/checkpoint_engines.py --disk-steps 3              # a disk that takes 3 steps to write the state
    python benchmarks/checkpoint_engines.py --cache 0.0625              # GiB of host memory for datastates

A round is, for each way of saving in turn, a save and the steps after it, then a save at every step. What the loop sees
is measured: the seconds of the call, of the steps while the save is in flight, and of all of it above steps without
saves, which every round has, too. `export` is datastates with `checkpoints.export_hf`. Memory is what the first save of
an engine adds to the process and its writer. Bars: a call of 1% of a step, steps of 1.10 times their length, a fifth
of DCP's cost, and the host memory that the config declares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import kenotron as kn
from kenotron.checkpoint.engine import Engine, Saved, find_engine
from kenotron.kernels.host_memory import keep_freed_memory
from kenotron.models import named_parameters
from kenotron.observers.export import ExportHook
from kenotron.optim.state import state_tensors
from kenotron.parallel.mesh import Mesh
from kenotron.training.build import build_run
from kenotron.training.checkpoint_hook import save
from kenotron.training.run import Run, close
from kenotron.training.step import train_step
from process_memory import tree_mib
from slow_disk import RATE

WAYS = ("none", "dcp", "torch", "async", "datastates", "export")
EVERY = 4
ENGINES = {"torch": "torch", "async": "async", "datastates": "datastates", "export": "datastates"}
LAZY = ("datastates", "export")
WRITER_MIB = 64  # what a process that imports the writer may take, besides the memory that it shares


@dataclass
class Times:
    """Seconds of one way of saving; one entry a round."""

    calls: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)  # steps during which the save went on: their mean
    cycles: list[float] = field(default_factory=list)  # a call and `EVERY` steps
    each: list[float] = field(default_factory=list)  # a call and a step, with a save at every step
    written: list[float] = field(default_factory=list)
    memory: float = 0.0  # MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk-steps", type=float, default=None, help="steps that the state takes to be written")
    parser.add_argument("--cache", type=float, default=16.0, help="datastates.host_cache_size (default: 16)")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default: here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder or Path.cwd(), prefix="checkpoint-engines-"))
    try:
        measure(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def configure(arguments: argparse.Namespace, folder: Path) -> kn.config.Config:  # type: ignore[name-defined]
    """A Llama on random tokens, fp32, AdamW."""
    hidden = arguments.hidden
    return kn.load(
        {
            "general": {"project": "benchmark", "run": "engines", "seed": 1},
            "model": {
                "model_config": {
                    "hidden_size": hidden,
                    "intermediate_size": hidden * 11 // 4,
                    "num_hidden_layers": arguments.layers,
                    "num_attention_heads": hidden // 64,
                    "num_key_value_heads": hidden // 64,
                    "vocab_size": 8192,
                    "max_position_embeddings": 2048,
                },
                "init_method": {"std": 0.02},
                "dtype": "float32",
            },
            "checkpoints": {
                "checkpoints_path": str(folder / "ours"),
                "checkpoint_interval": 10**6,
                "writer": "python" if arguments.disk_steps is None else "slow_disk.slow_file",
            },
            "logging": {"log_dir": str(folder / "logs"), "log_level": "error"},
            "tokens": {
                "sequence_length": arguments.tokens,
                "train_steps": 10**6,
                "micro_batch_size": 1,
                "batch_accumulation_per_replica": 1,
            },
            "optimizer": {
                "optimizer_factory": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
                "zero_stage": 0,
                "weight_decay": 0.1,
                "clip_grad": 1.0,
                "accumulate_grad_in_fp32": True,
                "learning_rate_scheduler": {
                    "learning_rate": 1e-4,
                    "lr_warmup_steps": 0,
                    "lr_decay_style": "constant",
                },
            },
            "data_stages": [{"name": "only", "start_training_step": 1, "data": {"dataset": None, "seed": 3}}],
        }
    )


def step(run: Run) -> float:
    """The seconds of one step."""
    batches = run.data.batch(run.step + 1)
    started = time.perf_counter()
    train_step(run, batches)
    run.step += 1
    return time.perf_counter() - started


def through_dcp(run: Run, folder: Path) -> None:
    """Save weights and optimizer as torch does."""
    parameters = dict(named_parameters(*run.parts))
    tensors = {**parameters, **state_tensors(parameters.items(), run.optimizer)}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=folder / str(run.step), no_dist=True)


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Time the ways in turn, and print."""
    config = configure(arguments, folder)
    run = build_run(config, Mesh(), torch.device("cpu"))
    size = sum(4 * parameter.numel() for _, parameter in named_parameters(*run.parts)) * 3
    ways = [way for way in WAYS if way != "dcp" or arguments.disk_steps is None]  # DCP writes to the machine's disk
    times = {way: Times() for way in ways}
    first, engines = {}, {}
    try:
        plain = min(step(run) for _ in range(4))
        if arguments.disk_steps is not None:
            os.environ[RATE] = str(size / (arguments.disk_steps * plain))
        for way in ways:  # plans, memory, imports
            before = tree_mib(os.getpid())
            engines[way] = make_engine(ENGINES[way], config, arguments.cache) if way in ENGINES else None
            first[way] = a_round(way, run, engines[way], folder, Times())
            times[way].memory = tree_mib(os.getpid()) - before
        for _ in range(arguments.rounds):
            for way in ways:
                a_round(way, run, engines[way], folder, times[way])
                of = times[way]
                print(f"{way} {of.calls[-1]:.3f} {of.cycles[-1]:.2f} {of.each[-1]:.2f} {of.written[-1:]}", flush=True)
        report(times, first, size, arguments.cache)
    finally:
        for engine in engines.values():
            if engine is not None:
                engine.close()
        close(run)


def make_engine(name: str, config: kn.config.Config, cache: float) -> Engine:  # type: ignore[name-defined]
    """The engine `name`, with `cache` GiB if it is datastates."""
    settings = [f"checkpoints.datastates={{host_cache_size: {cache}}}"] if name == "datastates" else []
    return find_engine(name)(kn.load(config, [f"checkpoints.checkpointing_engine={name}", *settings]))


class Saving:
    """One way of saving: the call, and what a training loop does about it after each step."""

    def __init__(self, way: str, run: Run, engine: Engine | None, folder: Path, times: Times) -> None:
        self.way, self.run, self.folder, self.times = way, run, folder, times
        self.export = ExportHook() if way == "export" else None
        if engine is not None:
            run.checkpoints.engine = engine

    def call(self) -> None:
        if self.way == "dcp":
            through_dcp(self.run, self.folder / "dcp")
        elif self.way != "none":
            self._complete(save(self.run))

    def step(self) -> float:
        seconds, started = step(self.run), time.perf_counter()
        if self.run.checkpoints.engine.in_flight and self.run.checkpoints.engine.settled():
            self._complete(self.run.checkpoints.engine.collect())
        if self.export is not None:
            self.export.after_step(self.run, None)  # type: ignore[arg-type]
        return seconds + time.perf_counter() - started

    @property
    def in_flight(self) -> bool:
        return self.run.checkpoints.engine.in_flight or (self.export is not None and self.export.background is not None)

    def finish(self) -> None:
        self._complete(self.run.checkpoints.engine.collect())
        if self.export is not None:
            self.export.on_train_end(self.run)

    def _complete(self, outcomes: list[Any]) -> None:
        for saved in outcomes:
            assert isinstance(saved, Saved), saved
            self.times.written.append(saved.seconds)
            if self.export is not None:
                self.export.on_save(self.run, saved.path)


def a_round(way: str, run: Run, engine: Engine | None, folder: Path, times: Times) -> float:
    """A save and `EVERY` steps; then a save at every one of `EVERY` steps. Returns the seconds of the first call."""
    for clean in ("ours", "dcp"):
        shutil.rmtree(folder / clean, ignore_errors=True)
    os.sync()
    step(run)
    saving = Saving(way, run, engine, folder, times)

    started = time.perf_counter()
    saving.call()
    times.calls.append(time.perf_counter() - started)
    busy = []
    for _ in range(EVERY):
        in_flight = saving.in_flight
        seconds = saving.step()
        if in_flight:
            busy.append(seconds)
    times.cycles.append(time.perf_counter() - started)
    times.in_flight += [statistics.fmean(busy)] if busy else []
    saving.finish()
    os.sync()

    saving.call()  # so that every call below finds a save in flight, as in a long run
    saving.step()
    started = time.perf_counter()
    for _ in range(EVERY):
        saving.call()
        saving.step()
    times.each.append((time.perf_counter() - started) / EVERY)
    saving.finish()
    return times.calls[-1]


def report(times: dict[str, Times], first: dict[str, float], size: int, cache: float) -> None:
    """One line for each way, of the medians; then the bars."""
    middle = statistics.median
    plain = middle(cycle / EVERY for cycle in times["none"].cycles)
    print(f"\n{size / 2**20:.0f} MiB of state, steps of {plain:.3f} s; medians of {len(times['none'].cycles)} rounds")
    print("            call (first)     % of step   in flight  cost, every 4th  cost, every step  written in   memory")
    costs = {}
    for way, of in times.items():
        call, cost, each = middle(of.calls), middle(of.cycles) - EVERY * plain, middle(of.each) - plain
        costs[way] = cost, each
        busy = f"{middle(of.in_flight) / plain:.2f} x" if of.in_flight else "-"
        written = f"{middle(of.written):.2f} s" if of.written else "-"
        print(
            f"{way:10s} {call:6.3f} ({first[way]:6.3f}) s  {100 * call / plain:7.2f} %  {busy:>9s}  {cost:12.3f} s"
            f"  {each:14.3f} s  {written:>10s}  {of.memory:4.0f} MiB"
        )
    declared = min(cache * 2**10, size / 2**20)
    bars = [
        ("host memory of datastates, MiB", times["datastates"].memory, declared + WRITER_MIB, 1),
        *((f"call of {way}, % of a step", 100 * middle(times[way].calls) / plain, 1.0, 1) for way in LAZY),
        *((f"steps in flight, {way}", middle(times[way].in_flight) / plain, 1.10, 1) for way in LAZY),
    ]
    if "dcp" in times:
        noise = 0.01 * plain  # a cost below that is not told from none
        ratios = [costs["dcp"][each] / max(costs["datastates"][each], noise) for each in (0, 1)]
        bars += [
            (f"cost of dcp / of datastates, {what}", ratio, 5.0, -1)
            for what, ratio in zip(("every 4th step", "every step"), ratios)
        ]
    for name, value, bar, sign in bars:
        print(f"{name}: {value:.2f} (bar {bar:.4g}: {'met' if sign * value <= sign * bar else 'MISSED'})")


if __name__ == "__main__":
    main()
