"""Runs that are killed a thousand times and resumed each time, against runs that are not.

    python -m soak.run [--kills 1000]

    one process: 1324 steps, 310 of them done again: every loss, gradient norm … equals that of a run without kills
    dp 2: 711 steps, 203 of them done again: every loss, gradient norm … equals that of a run without kills
    …
    1000 kills in 1204 s: all processes 512, a rank 391, a writer 97; 480 of them within a save

The runs of `RUNS`, two at a time, each with the engines torch, async and datastates in turns and a checkpoint every
step or every second. SIGKILL comes at a random moment of the start or of the steps, to all processes at once, to one
rank, or to a process that writes checkpoints, which the run survives. What was announced is never lost: the run goes on
at that checkpoint or at a newer one. Exit code 1 if it does not, if a checkpoint is damaged, if a rank hangs, or if a
number differs, also of steps that are done again. Ctrl-C ends the kills early, not the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import TCPStore

from chaos.run import EQUAL, differences
from support.nursery import Child, Finished, Nursery
from support.tiny_run import equal_bits, metrics, saved_weights, tiny_config, tiny_yaml

EXPERTS = "model.model_config.num_local_experts=4"
MAMBA = "{is_mamba_config: true, hidden_size: 16, num_hidden_layers: 2, vocab_size: 64, state_size: 4}"
PIPELINE = ("parallelism.pp=2", "tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=2")
RUNS = {  # overrides, and the share of all kills: two ranks take longer to start, and one of them to see the other end
    "one process": ((), 0.35),
    "dp 2": (("parallelism.dp=2", "tokens.micro_batch_size=2"), 0.15),
    "tp 2": (("parallelism.tp=2",), 0.13),
    "pp 2": (PIPELINE, 0.13),
    "experts, ZeRO 3": (("parallelism.dp=2", "tokens.micro_batch_size=2", "optimizer.zero_stage=3", EXPERTS), 0.14),
    "Mamba": ((f"model.model_config={MAMBA}",), 0.1),
}
AT_ONCE = 2
ENGINES = ("torch", "async", "datastates")
KINDS = ("all processes", "all processes", "a rank", "a rank", "a writer")
AT_THE_START = 0.25  # of the kills, counted from the start of the run; the others from its first step
WITHIN_S = 0.6
ENDS_WITHIN_S = 300.0  # a second or two on an idle machine; a machine may be busy with other work
LOOK_EVERY_S = 0.005


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="make soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, help="kills (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and kinds of kills")
    options = parser.parse_args(arguments)
    over = threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as temporary,
        ThreadPoolExecutor(AT_ONCE) as threads,
        contextlib.ExitStack() as opened,
    ):
        soaks = []
        for name, (overrides, share) in RUNS.items():
            folder = Path(temporary) / name.replace(" ", "-")
            soak = Soak(name, folder, overrides, random.Random(f"{options.seed} {name}"))
            soaks.append((soak, round(share * options.kills)))
        opened.callback(over.set)
        opened.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, lambda *_: over.set()))
        began = time.monotonic()
        futures = [threads.submit(soak.run, kills, over) for soak, kills in soaks]
        different = [future.result() for future in as_completed(futures)]
        kinds = sum((soak.kinds for soak, _ in soaks), Counter())
        within = sum(soak.within_a_save for soak, _ in soaks)
        print(f"\n{kinds.total()} kills in {time.monotonic() - began:.0f} s: ", end="")
        print(f"{', '.join(f'{kind} {count}' for kind, count in kinds.items())}; {within} of them within a save")
        return int(any(different))


class Soak:
    """A run in `folder` that is killed and resumed. It is not the same process twice, but always the same run."""

    def __init__(self, name: str, folder: Path, overrides: Sequence[str], draw: random.Random) -> None:
        self.name, self.folder, self.overrides, self.draw = name, folder, tuple(overrides), draw
        self.ranks = tiny_config(folder, *overrides).parallelism.world_size
        self.store: TCPStore | None = None
        self.nurseries: list[Nursery] = []
        self.children: list[Child] = []
        self.starts = self.announced = self.done_again = self.within_a_save = 0
        self.kinds: Counter[str] = Counter()
        self.numbers: dict[int, list[Any]] = {}  # of every step that was done

    def __enter__(self) -> Soak:
        self.nurseries = [Nursery() for _ in range(self.ranks)]
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            _kill(child.pid)
        for nursery in self.nurseries:
            nursery.__exit__()

    def run(self, kills: int, over: threading.Event) -> bool:
        """`kills` kills, and the comparison; returns whether anything differs. Nothing, if it is `over` already."""
        if over.is_set():
            return False
        with self:
            self.suffer(kills, over)
            return self.compare()

    def suffer(self, kills: int, over: threading.Event) -> None:
        """`kills` kills, then a few steps to the end of the run."""
        for kind in self.draw.choices(KINDS, k=kills):
            if over.is_set():
                break
            if not self.children:
                self._start(self.folder, *self._settings())
            if self.draw.random() > AT_THE_START:
                self._wait(lambda: "\nstep " in self._said())
            until = time.monotonic() + self.draw.uniform(0, WITHIN_S)
            self._wait(lambda until=until: time.monotonic() > until)
            self._kill(kind)
            if self.kinds.total() % 50 == 0:
                print(f"{self.name}: {self.kinds.total()} kills, step {max(self.numbers, default=0)}", flush=True)
        if self.children:
            self._kill(KINDS[0], counts=False)
        last = max(self.numbers, default=0) + 10
        self._start(self.folder, *self._settings(), f"tokens.train_steps={last}")
        self._end(0)

    def compare(self) -> bool:
        """Do the same steps without kills, and print what differs; returns whether anything does."""
        steps, whole = max(self.numbers), self.folder / "without-kills"
        self._start(whole, f"tokens.train_steps={steps}")
        for finished in self._ended():
            if finished.code != 0:
                self._fail(f"the run without kills ended with {finished.code}", finished)
        different = differences(metrics(tiny_config(self.folder)), metrics(tiny_config(whole)))
        for part in ("model", "optimizer"):
            ours, reference = (
                saved_weights(folder / "checkpoints" / str(steps), part) for folder in (self.folder, whole)
            )
            different += [] if equal_bits(ours, reference) else [f"{part} at the end is not that"]
        left = [path for path in self.folder.rglob("*") if ".tmp-" in path.name or ".trash-" in path.name]
        if left:
            print(f"{self.name}: left behind: {', '.join(str(path.relative_to(self.folder)) for path in left)}")
        equal = "every loss, gradient norm and hash of weights equals that" if not different else different[0]
        print(f"{self.name}: {steps} steps, {self.done_again} of them done again: {equal} of a run without kills")
        return bool(different or left)

    # ---- processes ---------------------------------------------------------------------------------------------

    def _settings(self) -> list[str]:
        """Overrides of the next start."""
        return [
            f"checkpoints.checkpointing_engine={ENGINES[self.starts % len(ENGINES)]}",
            f"checkpoints.checkpoint_interval={self.draw.choice((1, 2))}",
            "checkpoints.keep_last=2",
        ]

    def _start(self, folder: Path, *overrides: str) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun has one for each start
        given = ("tokens.train_steps=1000000", *self.overrides, *overrides)
        folder.mkdir(parents=True, exist_ok=True)
        config = tiny_yaml(folder)
        for rank, nursery in enumerate(self.nurseries):
            own = folder / f"rank-{rank}"  # of its output
            own.mkdir(parents=True, exist_ok=True)
            for name in ("stdout.txt", "stderr.txt"):  # a rank may be killed before it opens them
                (own / name).write_text("")
            self.children.append(nursery.start("train", config, *given, folder=own, env=self._place(rank)))
        self.starts += 1

    def _place(self, rank: int) -> dict[str, str]:
        """The environment of one rank of several, as torchrun sets it."""
        if self.ranks == 1 or self.store is None:
            return {}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _kill(self, kind: str, counts: bool = True) -> None:
        """Kill some processes, and wait for the end of the run unless it goes on without them."""
        ranks = [child.pid for child in self.children]
        writers = [pid for rank in ranks for pid in _children(rank)]
        if kind == "a writer" and not writers:
            kind = "a rank"
        victims = {"a rank": ranks, "a writer": writers}.get(kind, ranks + writers)
        if kind != "all processes":
            victims = [self.draw.choice(victims)]
        if counts:
            self.kinds[kind] += 1
            self.within_a_save += any((self.folder / "checkpoints").glob("*.tmp-*"))
        for pid in self.draw.sample(victims, len(victims)):
            _kill(pid)
        if kind != "a writer":
            self._end(-signal.SIGKILL)

    def _end(self, expected: int) -> None:
        """Wait until all ranks have ended, one of them with the code `expected`, and take note of what they did."""
        ended = self._ended()
        codes = [finished.code for finished in ended]
        if expected not in codes or 2 in codes:
            self._fail(f"ranks ended with {codes}, expected {expected}", *ended)
        said = ended[0].stdout
        if "skipping checkpoint" in said:
            self._fail("a checkpoint is damaged", *ended)
        first = re.search(r"^Training from step (\d+) ", said, re.MULTILINE)
        if first is None:  # it was killed before it knew
            return
        start = int(first[1]) - 1
        if start < self.announced:
            self._fail(f"it resumed at step {start}, and step {self.announced} was announced", *ended)
        done = [int(step) for step in re.findall(r"^step (\d+)/", said, re.MULTILINE)]
        saved = [int(step) for step in re.findall(r"^Saved checkpoint at \S+/(\d+):", said, re.MULTILINE)]
        self.announced = max([self.announced, *saved])
        self._note_steps(start, max([start, *done]))

    def _note_steps(self, start: int, last: int) -> None:
        """Compare the numbers of steps that are done again."""
        lines = (self.folder / "logs" / "tiny" / "metrics.jsonl").read_bytes().splitlines() if last > start else []
        for line in map(json.loads, lines[start:last]):
            if "state_hash" not in line:
                continue  # the step of a rank whose neighbour was killed before its hooks were done
            step, numbers = line["iteration"], [line[name] for name in EQUAL]
            self.done_again += step in self.numbers
            if self.numbers.setdefault(step, numbers) != numbers:
                self._fail(f"step {step} was {self.numbers[step]}, and is {numbers} when it is done again")

    def _ended(self) -> list[Finished]:
        """What the ranks said; `children` is empty then."""
        until = None
        while any(running := [child.runs() for child in self.children]):
            if until is None and not all(running):
                until = time.monotonic() + ENDS_WITHIN_S
                if "\nTraining from step " not in self._said():  # ranks that have not met are for torchrun to end
                    for child in self.children:
                        _kill(child.pid)
            if until is not None and time.monotonic() > until:
                self._fail(f"a rank still runs {ENDS_WITHIN_S:g} s after the end of another", *self._aborted())
            time.sleep(LOOK_EVERY_S)
        ended = [child.wait() for child in self.children]
        self.children = []
        return ended

    def _aborted(self) -> list[Finished]:
        """What ranks that hang said, and where they are, which faulthandler writes."""
        for child in self.children:
            _kill(child.pid, signal.SIGABRT)
        return [child.wait() for child in self.children]

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Until `condition`, while all ranks run."""
        until = time.monotonic() + ENDS_WITHIN_S
        while not condition():
            if not all(child.runs() for child in self.children):
                self._fail("a rank has ended by itself", *self._ended())
            if time.monotonic() > until:
                self._fail(f"no step in {ENDS_WITHIN_S:g} s", *self._aborted())
            time.sleep(LOOK_EVERY_S)

    def _said(self) -> str:
        return (self.folder / "rank-0" / "stdout.txt").read_text(errors="replace")

    def _fail(self, problem: str, *ended: Finished) -> NoReturn:
        output = "".join(f"\n--- rank {rank}:\n{each.stdout}{each.stderr}" for rank, each in enumerate(ended))
        sys.exit(f"{self.name}, kill {self.kinds.total()}, start {self.starts}: {problem}{output}")


def _children(pid: int) -> list[int]:
    """The processes that a rank has started: an engine's, which write checkpoints."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
