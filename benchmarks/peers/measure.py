"""Memory and time of single steps, by the same rule for every contender.

Memory of a step is read in two ways, both at the end-of-step point where no gradient is held:

* **live tensors**: bytes of all tensors held between steps (found by the garbage collector, each storage once), plus
  the highest running sum of allocations minus frees that torch's own CPU allocator reports during one step. Exact, and
  blind to how malloc caches. On CUDA the caching allocator's own peak.
* **resident memory**: after `malloc_trim`, the kernel's high-water mark is reset, and read again after one step.
  Includes what libraries allocate behind torch's back, and page granularity.

From the live tensors the parent subtracts 16 bytes a parameter: weights, gradients and both AdamW moments in fp32.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from work import Work


class Memory:
    """Two steps: the first for resident memory, the second under the profiler for live tensors."""

    def __init__(self, work: Work) -> None:
        self.cuda = work.device != "cpu"
        self.result: dict[str, Any] = {}
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark

    def after_step(self, left: int) -> None:
        if left == 1:
            self.result["rss_peak"] = peak_resident()
            self.held = held_bytes()
            self.profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            if not self.cuda:
                self.profiler.start()
        elif self.cuda:
            self.result["live_peak"] = torch.cuda.max_memory_allocated()
        else:
            self.profiler.stop()
            self.result["live_peak"] = self.held + _peak_of(self.profiler)


class Profile:
    """One step to warm up, two under the profiler; tables of operations by self time, also by shape of their inputs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result: dict[str, Any] = {}
        self.profiler = torch.profiler.profile(record_shapes=True)

    def after_step(self, left: int) -> None:
        if left == 2:
            self.profiler.start()
        elif left == 0:
            self.profiler.stop()
            for suffix, by_shape in ((".txt", False), (".shapes.txt", True)):
                operations = self.profiler.key_averages(group_by_input_shape=by_shape)
                table = operations.table(sort_by="self_cpu_time_total", row_limit=60, max_name_column_width=90)
                self.path.with_suffix(suffix).write_text(table)


def held_bytes() -> int:
    """Bytes of all CPU tensors alive in Python, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not hasattr(thing, "placements"):
            storage = thing.untyped_storage()
            if storage.device.type == "cpu" and storage.data_ptr():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _peak_of(profiler: torch.profiler.profile) -> int:
    """Highest running sum of the allocator's own reports."""
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = [
        (event.start_ns(), event.nbytes())  # type: ignore[attr-defined]
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    total = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        total += size
        peak = max(peak, total)
    return peak


def peak_resident() -> int:
    """The kernel's high-water mark of this process, in bytes; 0 where /proc does not give it."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
