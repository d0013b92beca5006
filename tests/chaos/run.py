"""Faults at random moments of one job with spare processes, and what they cost.

    python -m chaos.run [--faults 62] [--every 25] [--layout "parallelism.dp=2 parallelism.tp=2"]

    62 faults in 1765 s: 62 survived, mean stall 2.32 s, 91.9% of the time without stalls
    33 times kill or stop a rank: mean stall 1.92 s, longest 3.5 s
    17 times hang a rank: mean stall 4.51 s, longest 5.8 s
    12 times kill a spare: mean stall 0.29 s, longest 0.5 s
    15628 steps: every loss, gradient norm and hash of weights equals that of a run without faults
    8.85 steps per second, and 8.28 without faults

A rank is killed, stopped (SIGSTOP) or hangs in Python, or a spare process is killed. The stall of a fault is the time
until the job has done the first step that it had not done before, steps that are done again included, less the time of
one step. That of a hang begins with `TIMEOUT_S`, for which the other ranks wait. The run without faults comes after the
other: on a shared machine, its speed may be another for reasons of its own. Exit code 1 if the job ended, or if a
number differs.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kenotron.config.dotted import search_path
from support.tiny_run import KENOTRON, environment, tiny_dict

FAULTS = ("kill a rank", "kill a rank", "kill a rank", "stop a rank", "hang a rank", "kill a spare")
GROUPS = {"kill or stop a rank": FAULTS[:4], "hang a rank": FAULTS[4:5], "kill a spare": FAULTS[5:]}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "hang": signal.SIGUSR2}  # user_parts.HangOnSignal
TIMEOUT_S = 2.5
EQUAL = ("lm_loss", "grad_norm", "lr", "consumed_tokens", "state_hash")
GIVE_UP_S = 120.0
LOOK_EVERY_S = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=62, help="faults (default: 62)")
    parser.add_argument("--every", type=float, default=25.0, help="mean seconds between them (default: 25)")
    parser.add_argument("--layout", default="parallelism.dp=2 parallelism.tp=2", help="overrides of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and kinds of faults")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        job = Job(Path(temporary) / "faults", options.layout.split())
        began, stalls = time.monotonic(), list[tuple[str, float]]()
        try:
            for number in range(1, options.faults + 1):
                job.train_for(draw.uniform(0.5, 1.5) * options.every)
                kind = draw.choice(FAULTS)
                stalls.append((kind, job.suffer(kind, draw)))
                print(f"fault {number}: {kind} at step {job.steps()}: {stalls[-1][1]:.2f} s", flush=True)
            job.train_for(options.every / 2)
        finally:
            seconds = time.monotonic() - began
            steps, code = job.stop()
        print(f"\n{options.faults} faults in {seconds:.0f} s: {len(stalls)} survived, ", end="")
        print(f"mean stall {statistics.fmean(stall for _, stall in stalls):.2f} s, ", end="")
        print(f"{100 - 100 * sum(stall for _, stall in stalls) / seconds:.1f}% of the time without stalls", flush=True)
        for name, kinds in GROUPS.items():
            if of_kinds := [stall for kind, stall in stalls if kind in kinds]:
                print(f"{len(of_kinds)} times {name}: mean stall {statistics.fmean(of_kinds):.2f} s, ", end="")
                print(f"longest {max(of_kinds):.1f} s", flush=True)
        quiet = Job(Path(temporary) / "no-faults", [*options.layout.split(), f"tokens.train_steps={steps}"])
        quiet.wait()
        different = differences(job.metrics(), quiet.metrics())
        equal = "every loss, gradient norm and hash of weights equals that" if not different else different[0]
        print(f"{steps} steps: {equal} of a run without faults")
        print(f"{job.steps_per_second():.2f} steps per second, and {quiet.steps_per_second():.2f} without faults")
        return int(code != 0 or bool(different))


def differences(ours: list[dict[str, Any]], reference: list[dict[str, Any]]) -> list[str]:
    """Where two runs differ, in words that ``of a run without faults`` follows."""
    if len(ours) != len(reference):
        return [f"{len(ours)} lines of metrics are not the {len(reference)}"]
    return [
        f"{name} {mine[name]} of step {mine['iteration']} is not the {other[name]}"
        for mine, other in zip(ours, reference, strict=True)
        for name in ("iteration", *EQUAL)
        if mine[name] != other[name]
    ]


class Job:
    """``kenotron train --spares 2`` on small layers in `folder`, until it is stopped."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(config(folder)))
        self.errors = (folder / "stderr.txt").open("wb")
        self.process = subprocess.Popen(
            [*KENOTRON, "train", "run.yaml", *overrides, "--spares", "2"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env=environment(folder, TMPDIR=str(folder / "tmp"), OMP_NUM_THREADS="1", PYTHONPATH=search_path()),
        )
        self._wait_until(lambda: self.steps() > 0)
        self.first_step_at = time.monotonic()
        self.seconds = 0.0

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        file = self.folder / "logs" / "tiny" / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    def steps(self) -> int:
        """Steps done, of which the last may be done again after a fault."""
        file = self.folder / "logs" / "tiny" / "metrics.jsonl"
        lines = file.read_bytes().rstrip(b"\n").rsplit(b"\n", 1) if file.exists() else [b""]
        try:
            return int(json.loads(lines[-1])["iteration"])
        except json.JSONDecodeError:  # there is none, or it is being written
            return 0

    def steps_per_second(self) -> float:
        """From the first step to the last."""
        return len(self.metrics()) / self.seconds

    def train_for(self, seconds: float) -> None:
        """Wait, and see that training goes on meanwhile."""
        until, before = time.monotonic() + seconds, self.steps()
        self._wait_until(lambda: time.monotonic() > until and self.steps() > before)

    def suffer(self, kind: str, draw: random.Random) -> float:
        """A fault; returns its stall in seconds."""
        what, _, whom = kind.partition(" a ")
        process = draw.choice(self._ranks() if whom == "rank" else self._spares())
        before, started = self.steps(), time.monotonic()
        os.kill(process, SIGNALS[what])
        self._wait_until(lambda: self.steps() > before + 1)
        step = statistics.median(line["elapsed_time_per_iteration_ms"] for line in self.metrics()[-50:]) / 1000
        return max(time.monotonic() - started - 2 * step, 0.0)

    def stop(self) -> tuple[int, int]:
        """Ask the job to save and stop; the steps done, and its exit code."""
        self.process.terminate()
        return self.wait(), self.process.returncode

    def wait(self) -> int:
        """Wait for its end; the steps done."""
        while self.process.poll() is None:
            time.sleep(LOOK_EVERY_S)
        self.seconds = time.monotonic() - self.first_step_at
        self.errors.close()
        return self.steps()

    def _ranks(self) -> list[int]:
        return [int(path.read_text()) for path in (self.folder / "tmp").glob("kenotron-*/[0-9]*.pid")]

    def _spares(self) -> list[int]:
        """Copies of the launcher's only child."""
        return [copy for child in children(self.process.pid) for copy in children(child) if copy not in self._ranks()]

    def _wait_until(self, done: Any) -> None:
        until = time.monotonic() + GIVE_UP_S
        while not done():
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                sys.exit(f"the job has ended or hangs:\n{(self.folder / 'stderr.txt').read_text()[-3000:]}")
            time.sleep(LOOK_EVERY_S)


def children(process: int) -> list[int]:
    """The processes that `process` has started and that run."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def config(folder: Path) -> dict[str, Any]:
    """Steps of about a tenth of a second, saved every tenth."""
    content = tiny_dict(folder)
    content["model"]["model_config"] |= {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 128}
    content["tokens"] |= {"sequence_length": 128, "micro_batch_size": 4, "train_steps": 1_000_000}
    content["checkpoints"] |= {"checkpoint_interval": 10, "keep_last": 2}
    content["general"]["hooks"] = ["support.user_parts.HangOnSignal"]
    content["parallelism"] = {"timeout_seconds": TIMEOUT_S}
    return content


if __name__ == "__main__":
    sys.exit(main())
