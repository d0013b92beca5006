"""What does a checkpoint cost training? Every engine, and torch.distributed.checkpoint.save, beside the same steps.

    taskset -c 0,1 python benchmarks/checkpoint_engines.py              # 21 M parameters, one thread of two cores
    python benchmarks/checkpoint_engines.py --hidden 1024 --layers 6 --tokens 1024 --rounds 3

A round is, for each way of saving in turn, a save and the steps after it. What the loop sees is measured: the seconds
of the call, of the steps while the save is in flight, and of all of it above steps without saves, which every round
has, too. Bars: a call of 1% of a step, steps of 1.10 times their length, a fifth of DCP's cost.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import kenotron as kn
from kenotron.checkpoint.engine import Saved, find_engine
from kenotron.kernels.host_memory import keep_freed_memory
from kenotron.optim.state import state_tensors
from kenotron.parallel.mesh import Mesh
from kenotron.training.build import build_run
from kenotron.training.checkpoint_hook import save
from kenotron.training.run import Run, close
from kenotron.training.saved_state import named_parameters
from kenotron.training.step import train_step

WAYS = ("none", "dcp", "torch", "async", "datastates")
EVERY = 4


@dataclass
class Times:
    """Seconds of one way of saving; one entry a round."""

    calls: list[float] = field(default_factory=list)
    in_flight: list[float] = field(default_factory=list)  # steps during which the save went on: their mean
    cycles: list[float] = field(default_factory=list)  # a call and `EVERY` steps
    each: list[float] = field(default_factory=list)  # a call and a step, with a save at every step
    written: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512, help="of a step")
    parser.add_argument("--rounds", type=int, default=5)
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
            "checkpoints": {"checkpoints_path": str(folder / "ours"), "checkpoint_interval": 10**6},
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


def through_dcp(run: Run, folder: Path) -> Callable[[], list[Any]]:
    def call() -> list[Any]:
        parameters = dict(named_parameters(*run.parts))
        tensors = {**parameters, **state_tensors(parameters.items(), run.optimizer)}
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            dcp.save(tensors, checkpoint_id=folder / str(run.step), no_dist=True)
        return []

    return call


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Time the ways in turn, and print."""
    config = configure(arguments, folder)
    run = build_run(config, Mesh(), torch.device("cpu"))
    engines = {
        name: find_engine(name)(kn.load(config, [f"checkpoints.checkpointing_engine={name}"])) for name in WAYS[2:]
    }
    times = {way: Times() for way in WAYS}
    first = {}
    try:
        for _ in range(3):
            step(run)
        for way in WAYS:  # plans, memory, imports
            first[way] = a_round(way, run, engines, folder, Times())
        for _ in range(arguments.rounds):
            for way in WAYS:
                a_round(way, run, engines, folder, times[way])
                of = times[way]
                print(f"{way} {of.calls[-1]:.3f} {of.cycles[-1]:.2f} {of.each[-1]:.2f} {of.written[-1:]}", flush=True)
        size = sum(4 * parameter.numel() for _, parameter in named_parameters(*run.parts)) * 3
        report(times, first, size)
    finally:
        for engine in engines.values():
            engine.close()
        close(run)


def a_round(way: str, run: Run, engines: dict[str, Any], folder: Path, times: Times) -> float:
    """A save and `EVERY` steps; then a save at every one of `EVERY` steps. Returns the seconds of the first call."""
    run.engine = engines.get(way, engines["torch"])
    call: Callable[[], list[Any]] = lambda: save(run)  # noqa: E731
    if way == "dcp":
        call = through_dcp(run, folder / "dcp")
    elif way == "none":
        call = list
    for clean in ("ours", "dcp"):
        shutil.rmtree(folder / clean, ignore_errors=True)
    os.sync()
    step(run)

    started = time.perf_counter()
    call()
    times.calls.append(time.perf_counter() - started)
    busy = []
    for _ in range(EVERY):
        in_flight = run.engine.in_flight and not run.engine.settled()
        seconds = step(run)
        if in_flight:
            busy.append(seconds)
    times.cycles.append(time.perf_counter() - started)
    times.in_flight += [statistics.fmean(busy)] if busy else []
    times.written += [saved.seconds for saved in run.engine.collect() if isinstance(saved, Saved)]
    os.sync()

    started = time.perf_counter()
    for _ in range(EVERY):
        call()
        step(run)
    times.each.append((time.perf_counter() - started) / EVERY)
    run.engine.collect()
    return times.calls[-1]


def report(times: dict[str, Times], first: dict[str, float], size: int) -> None:
    """One line for each way, of the medians; then the bars."""
    middle = statistics.median
    plain = middle(cycle / EVERY for cycle in times["none"].cycles)
    print(f"\n{size / 2**20:.0f} MiB of state, steps of {plain:.3f} s; medians of {len(times['none'].cycles)} rounds")
    print("            call (first)     % of step   steps in flight   cost, every 4th   cost, every step   written in")
    costs = {}
    for way in WAYS[1:]:
        of = times[way]
        call, cost = middle(of.calls), middle(of.cycles) - EVERY * plain
        each = middle(of.each) - plain
        costs[way] = cost, each
        busy = f"{middle(of.in_flight) / plain:.2f} x" if of.in_flight else "-"
        written = f"{middle(of.written):.2f} s" if of.written else "-"
        print(
            f"{way:10s} {call:6.3f} ({first[way]:6.3f}) s  {100 * call / plain:7.2f} %  {busy:>14s}  {cost:12.3f} s"
            f"  {each:15.3f} s  {written:>12s}"
        )
    lazy = times["datastates"]
    for name, value, bar, met in (
        ("call, % of a step", 100 * middle(lazy.calls) / plain, 1.0, middle(lazy.calls) <= 0.01 * plain),
        (
            "steps in flight",
            middle(lazy.in_flight) / plain,
            1.10,
            middle(lazy.in_flight) <= 1.10 * plain,
        ),
        *(
            (
                f"cost of dcp / of datastates, every {'4th ' * (not index)}step",
                costs["dcp"][index] / max(costs["datastates"][index], 1e-9),
                5.0,
                costs["dcp"][index] >= 5 * costs["datastates"][index],
            )
            for index in (0, 1)
        ),
    ):
        print(f"{name}: {value:.2f} (bar {bar}: {'met' if met else 'MISSED'})")


if __name__ == "__main__":
    main()
