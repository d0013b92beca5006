"""What bf16 with fp32 masters costs on one rank: the layers' own casts against ``torch.autocast``, in one process.

    python benchmarks/one_rank.py                     the 17M model of `training.py`: a minute on one core
    python benchmarks/one_rank.py --size 135M --rounds 5

Both contenders are the same model with the same weights, stepped by the trainer's own `train_step`. `ours` is what
``model.dtype: bfloat16`` makes: no wrapper, each layer casts its fp32 weight where it uses it. `autocast` leaves all of
that to torch below the head (the head's kernel takes bf16 in both). They take turns, step by step:

    best step of ours <= 1.03 x best step of autocast
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from ours import build_run, configure  # noqa: E402
from work import SIZES, Work  # noqa: E402

from kenotron.data import TokenBatch  # noqa: E402
from kenotron.parallel.mesh import build_mesh  # noqa: E402
from kenotron.training.step import train_step  # noqa: E402
from layouts import draw  # noqa: E402

BAR = 1.03


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="17M")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    work = replace(SIZES[arguments.size], precision="bf16")
    steps = {"ours": stepper(work, autocast=False), "autocast": stepper(work, autocast=True)}
    losses = {name: step() for name, step in steps.items()}  # and everything is warm
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(arguments.rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            begin = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - begin)
    print(f"{work.name} bf16, one thread, {arguments.rounds} rounds")
    for name, times in seconds.items():
        best, median = min(times) * 1000, statistics.median(times) * 1000
        print(f"  {name:8} best {best:8.1f} ms   median {median:8.1f} ms   first loss {losses[name]:.5f}")
    ratio = min(seconds["ours"]) / min(seconds["autocast"])
    print(f"  ours / autocast {ratio:.3f}  bar {BAR}: {'met' if ratio <= BAR else 'MISSED'}")


def stepper(work: Work, autocast: bool) -> Callable[[], float]:
    """A function that does one step and returns its loss."""
    run = build_run(configure(work, compiled=False), build_mesh({}, 1, "cpu"))
    if autocast:
        leave_to_autocast(run.parts[0])
    tokens = draw(work, 0)
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], np.arange(len(tokens)))

    return lambda: train_step(run, [batch]).lm_loss


def leave_to_autocast(model: torch.nn.Module) -> None:
    """The model in fp32, everything below the head under autocast."""
    model.set_compute_dtype(torch.float32)  # type: ignore[operator]
    trunk = model.model
    plain = trunk.forward  # type: ignore[union-attr]

    def forward(*args: object) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = plain(*args)  # type: ignore[operator]
        return hidden.bfloat16()

    trunk.forward = forward  # type: ignore[union-attr,assignment]


if __name__ == "__main__":
    main()
