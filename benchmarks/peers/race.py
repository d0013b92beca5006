"""One row of the benchmark: all contenders alive at once, taking turns.

    for each round:  matmuls · transformers · Trainer · litgpt · … · kenotron compiled      a few steps each

Turns are seconds apart, so other work on the machine slows all of them alike. The order rotates by one each round. A
ratio is taken within each round, so drift over minutes cancels.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from work import Work

WORKER = Path(__file__).with_name("worker.py")


@dataclass
class Contender:
    """A worker process and its answers so far."""

    name: str
    process: subprocess.Popen[str]
    start_seconds: float = 0.0
    first_loss: float | None = None
    steps: int = 1
    step_seconds: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.listen()

    def listen(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: see its log")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(name: str, python: Path, work: Work, folder: Path, compile_cache: Path) -> Contender:
    """Spawn a contender and wait for its first step; the clock runs from the spawn."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(work.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache / name.replace(" ", "-")),
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = (folder / f"{name.replace(' ', '-')}.log").open("w")
    begin = time.perf_counter()
    command = [str(python), str(WORKER), name, str(folder)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
    )
    contender = Contender(name, process)
    try:
        contender.first_loss = contender.listen()["loss"]
    except RuntimeError as error:
        tail = (folder / f"{name.replace(' ', '-')}.log").read_text().strip().splitlines()[-3:]
        raise RuntimeError(f"{error}\n  " + "\n  ".join(tail)) from None
    contender.start_seconds = time.perf_counter() - begin
    return contender


def warm_up(contender: Contender, turn_seconds: float) -> None:
    """Two steps, then as many steps a turn as fill `turn_seconds`."""
    contender.ask("steps 1")
    seconds = contender.ask("steps 1")["seconds"]
    contender.steps = max(1, round(turn_seconds / seconds))


def race(contenders: list[Contender], rounds: int, say: Callable[[str], None]) -> None:
    """Fill `step_seconds` (one number a round) and `memory` of every contender."""
    for number in range(rounds):
        first = number % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            answer = contender.ask(f"steps {contender.steps}")
            contender.step_seconds.append(answer["seconds"] / contender.steps)
        latest = ", ".join(f"{c.name} {c.step_seconds[-1]:.3f}" for c in contenders)
        say(f"  round {number + 1} of {rounds}, seconds a step: {latest}")
    for contender in contenders:
        if contender.name != "matmuls":
            contender.memory = contender.ask("memory")


def result(contender: Contender, work: Work, ceiling: Contender | None) -> dict[str, Any]:
    """Raw numbers of one contender: speed in tokens/s, memory in bytes, times in seconds."""
    best, median = min(contender.step_seconds), statistics.median(contender.step_seconds)
    numbers: dict[str, Any] = {
        "tokens_per_sec": work.tokens / best,
        "tokens_per_sec_median": work.tokens / median,
        "step_seconds": contender.step_seconds,
        "start_seconds": contender.start_seconds,
        "first_loss": contender.first_loss,
    }
    if ceiling is not None:
        numbers["ceiling_share"] = min(ceiling.step_seconds) / best
    if contender.memory:
        numbers["activation_bytes"] = contender.memory["live_peak"] - work.state_bytes
        numbers["rss_peak_bytes"] = contender.memory["rss_peak"]
    return numbers
