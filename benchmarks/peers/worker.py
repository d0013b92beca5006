"""One contender in one process: builds, takes its first step, then obeys its parent.

    python worker.py kenotron-compiled FOLDER

Commands come as lines on stdin, answers go as JSON lines to the original stdout; whatever a contender prints goes to
stderr. Every training loop calls :class:`Pace` at the end of a step, which blocks until the parent asks for more steps.
So the real loops run, even one that cannot be called step by step (`Trainer.train`), and contenders can take turns.

    steps 8      run 8 steps                   → {"seconds": 3.1, "loss": 8.9}
    memory       two steps, measured           → {"live_peak": ..., "rss_peak": ..., "seconds": ..., "loss": ...}
    profile F    three steps, the last two under torch.profiler; tables in the files F.txt and F.shapes.txt
    quit
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from work import Work, read

# name → (module in this folder, compiled)
CONTENDERS = {
    "transformers": ("transformers_loop", False),
    "transformers compiled": ("transformers_loop", True),
    "Trainer": ("hf_trainer", False),
    "litgpt": ("litgpt_step", False),
    "litgpt compiled": ("litgpt_step", True),
    "picotron": ("picotron_step", False),
    "lingua": ("lingua_step", False),
    "lingua compiled": ("lingua_step", True),
    "kenotron": ("ours", False),
    "kenotron compiled": ("ours", True),
    "matmuls": ("matmuls", False),
}


@dataclass
class Job:
    """What a contender's `train(job, pace)` needs."""

    work: Work
    folder: Path
    compiled: bool

    def weights(self) -> dict[str, Tensor]:
        """Name → fp32 CPU tensor."""
        from safetensors.torch import load_file

        return load_file(self.folder / "weights.safetensors")

    def batches(self) -> Iterator[Tensor]:
        """``[micro_batch, sequence + 1]`` int64 on the CPU, for ever."""
        import numpy as np
        import torch

        batches = torch.from_numpy(np.load(self.folder / "tokens.npy"))
        while True:
            yield from batches


class Pace:
    """Called by a contender at the end of every step, gradients already dropped, with the step's loss."""

    def __init__(self, work: Work, answers: Any) -> None:
        self.work, self.answers = work, answers
        self.left, self.begin = 1, time.perf_counter()
        self.measurement: Any = None

    def __call__(self, loss: Tensor | None) -> None:
        self.left -= 1
        if self.measurement is not None:
            self.measurement.after_step(self.left)
        if self.left:
            return
        self._synchronize()
        answer: dict[str, Any] = {"seconds": time.perf_counter() - self.begin}
        if self.measurement is not None:
            answer |= self.measurement.result
        answer["loss"] = None if loss is None else float(loss)
        print(json.dumps(answer), file=self.answers, flush=True)
        self._obey()

    def _obey(self) -> None:
        command, *rest = (sys.stdin.readline().split(maxsplit=1)) or ["quit"]
        if command == "quit":
            self.answers.flush()
            os._exit(0)  # the loop around us may have no way out
        from measure import Memory, Profile

        self.measurement = None
        if command == "steps":
            self.left = int(rest[0])
        elif command == "memory":
            self.left, self.measurement = 2, Memory(self.work)
        elif command == "profile":
            self.left, self.measurement = 3, Profile(Path(rest[0].strip()))
        else:
            raise ValueError(f"unknown command {command!r}")
        self._synchronize()
        self.begin = time.perf_counter()

    def _synchronize(self) -> None:
        if self.work.device != "cpu":
            import torch

            torch.cuda.synchronize()


def main() -> None:
    contender, folder = sys.argv[1], Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = read(folder)
    os.environ["OMP_NUM_THREADS"] = str(work.threads)
    module, compiled = CONTENDERS[contender]
    train = importlib.import_module(module).train
    import torch

    torch.set_num_threads(work.threads)
    train(Job(work, folder, compiled), Pace(work, answers))


if __name__ == "__main__":
    main()
