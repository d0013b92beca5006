"""What a training step asks of a GPU, counted without one, and the time that would take at best.

python benchmarks/gpu/roofline.py "llama-3.2-1b 4096" "llama-3.1-8b 4096 selective"

    case                                         launches      GB   TFLOP  waits     A100     H100     H200 …   tokens/s
    llama-3.2-1b 4096                               1,071     160    68.4      1   19,754   53,271   58,632 …

The trainer's own step runs on the planner's stand-in, whose tensors have no memory, with the kernels of an NVIDIA GPU.
Every operator on the device is a launch; `kenotron.planner.rates` says how long it takes. Blocks are not compiled.

Rates are the data sheets', times what one H200 reached of its own (docs/benchmarks.md): other GPUs may do otherwise.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from cases import Case, find

from kenotron.kernels.attentions.choice import DeviceFacts, attention_of_run
from kenotron.kernels.fused import use_kernels
from kenotron.parallel.mesh import Mesh
from kenotron.planner.hardware import GPUS
from kenotron.planner.rates import seconds_of
from kenotron.planner.rehearsal import build_on
from kenotron.planner.stand_in import kernels_of_a_gpu
from kenotron.planner.trace import Operator, Ran, Trace
from kenotron.training.step import train_step
from support import stand_in

HOPPER = DeviceFacts("nvidia", (9, 0))
MACHINES = [GPUS[name] for name in ("a100", "h100", "h200", "b200", "mi300x")]


@cache
def device() -> torch.device:
    """The stand-in, which a process has once."""
    return stand_in.install()


def second_step(case: Case) -> tuple[list[Operator], dict[str, int]]:
    """The operators of the second step of `case`, and where the host waited for the device in it."""
    there, config = device(), case.config(Path("/nowhere"))
    with stand_in.memoryless(), kernels_of_a_gpu(HOPPER), use_kernels("triton"):
        run = build_on(config, Mesh(), there, attention_of_run(config, there)[0])
        batches = [case.batch(config.model.decoder.vocab_size)] * case.accumulation
        with stand_in.HostWaits():
            train_step(run, batches)
        run.step += 1
        with stand_in.HostWaits() as waits, Trace(Mesh(), 1) as trace:
            train_step(run, batches)
    return [event.operator for event in trace.events if isinstance(event, Ran)], dict(waits.sites)


def line(case: Case) -> str:
    """A row of the table."""
    operators, waits = second_step(case)
    moved, flops = sum(each.moved for each in operators), sum(each.flops for each in operators)
    speeds = (f"{case.tokens / sum(seconds_of(each, gpu) for each in operators):8,.0f}" for gpu in MACHINES)
    counted = f"{len(operators):8,} {moved / 1e9:7,.0f} {flops / 1e12:7,.1f} {sum(waits.values()):6}"
    return f"{case.name:44} {counted} {' '.join(speeds)}"


if __name__ == "__main__":
    print(
        f"{'case':44} launches      GB   TFLOP  waits "
        + " ".join(f"{gpu.name.split()[0]:>8}" for gpu in MACHINES)
        + "   tokens/s"
    )
    for name in sys.argv[1:] or ("llama-3.2-1b 4096", "llama-3.1-8b 4096 recompute", "llama-3.1-8b 4096 selective"):
        print(line(find(name)), flush=True)
