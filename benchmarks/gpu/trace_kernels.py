"""Where the time of a training step goes on a GPU: its kernels by time, and how long the GPU waits.

python benchmarks/gpu/trace_kernels.py "llama-3.2-1b 4096" model.compile=true
python benchmarks/gpu/trace_kernels.py "llama-3.1-8b 4096 selective" model.kernels=torch

    llama-3.2-1b 4096 model.compile=true: 144.4 ms a step, 56,740 tokens/s, 27.5 GiB at most, first step 13.7 s
    1,506 kernels, 136.1 ms of 141.4 busy
       21.11 ms   100 x nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT
          …
    waits of 5.3 ms, the longest 0.60 ms before triton_red_fused__fused_rms_norm

Names of cases: `python benchmarks/gpu/cases.py`. On a CPU (``miniature: tiny-llama 256``) there are no kernels to list.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from cases import find
from torch.autograd import DeviceType

from kenotron.kernels.fused import use_kernels
from kenotron.launch import set_defaults
from kenotron.parallel.device import best_device, memory, synchronize
from kenotron.parallel.mesh import Mesh
from kenotron.training.build import build_run
from kenotron.training.step import train_step

STEPS, SHOWN = 8, 30


def main(name: str, *overrides: str) -> None:
    """Run a few steps of the case `name`, changed by `overrides`, and print where their time goes."""
    set_defaults()
    device, case = best_device(), find(name)
    config = case.config(Path(tempfile.mkdtemp()), *overrides)
    batches = [case.batch(config.model.decoder.vocab_size)] * config.tokens.batch_accumulation_per_replica
    run = build_run(config, Mesh(), device)
    use_kernels(config.model.kernels).__enter__()  # to the end of the process

    def steps(count: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(count):
            train_step(run, batches)
            run.step += 1
        synchronize(device)
        return (time.perf_counter() - started) / count

    first, _, taken = steps(1), steps(2), steps(STEPS)
    tokens, most = sum(batch.tokens.size for batch in batches), memory(device)["peak_allocated"] / 2**30
    speed = f"{1e3 * taken:.1f} ms a step, {tokens / taken:,.0f} tokens/s, {most:.1f} GiB at most"
    print(f"{' '.join([name, *overrides])}: {speed}, first step {first:.1f} s", flush=True)
    with torch.profiler.profile() as profile:
        steps(1)
    describe([event for event in profile.events() if event.device_type == DeviceType.CUDA and _is_work(event)])


def _is_work(event: Any) -> bool:
    return not (getattr(event, "is_user_annotation", False) or event.name.startswith("Optimizer."))


def describe(kernels: list[Any]) -> None:
    """Print the kernels' sums by name, and the gaps between them."""
    if not kernels:
        print("no kernels: the device is a CPU")
        return
    sums: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        sums[kernel.name].append(kernel.time_range.elapsed_us() / 1e3)
    kernels.sort(key=lambda kernel: kernel.time_range.start)
    end, gaps = kernels[0].time_range.start, []
    for kernel in kernels:
        if kernel.time_range.start > end:
            gaps.append(((kernel.time_range.start - end) / 1e3, kernel.name))
        end = max(end, kernel.time_range.end)
    span = (end - kernels[0].time_range.start) / 1e3
    waits = sum(gap for gap, _ in gaps)
    print(f"{len(kernels):,} kernels, {span - waits:.1f} ms of {span:.1f} busy")
    for name, times in sorted(sums.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        print(f"{sum(times):8.2f} ms {len(times):5} x {name[:110]}")
    if gaps:
        longest, before = max(gaps)
        print(f"waits of {waits:.1f} ms, the longest {longest:.2f} ms before {before[:70]}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {Path(sys.argv[0]).name} CASE [OVERRIDE …]")
    main(*sys.argv[1:])
