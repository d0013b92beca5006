"""Functions that depend on the kind of device.

``torch.accelerator`` raises on a build without one, and CUDA, ROCm and CPU differ; this file hides the differences.
"""

import os
import platform
import resource
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from numpy.typing import ArrayLike

from kenotron.config.errors import InputError
from kenotron.config.packaged import packaged_yaml
from kenotron.config.parallelism import stays_on_cpu
from kenotron.kernels.products import rows_by_matrix


def best_device(local_rank: int = 0) -> torch.device:
    """Return the accelerator of this local rank if there is one, else the CPU.

    Raises InputError for an Intel GPU, and as `stays_on_cpu` does.
    """
    if stays_on_cpu():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if torch.xpu.is_available():
            raise InputError(
                f"{torch.xpu.get_device_name(0)}: Intel GPUs (XPU) are not supported; expected an NVIDIA or AMD GPU, "
                f"or KENOTRON_DEVICE=cpu, which trains on the CPU"
            )
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend(device: torch.device) -> str:
    """Return the process-group backend: gloo for CPU tensors, NCCL (RCCL on ROCm) plus gloo on accelerators."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def synchronize(device: torch.device) -> None:
    """Wait until queued device work is done; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def upload(array: ArrayLike, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return `array` as a tensor of `dtype` on `device`, without waiting for the copy.

    The copy to an accelerator is from pinned memory, since a copy from pageable memory would wait for all queued work,
    and on a separate stream, concurrent with that work. On a CPU the tensor shares the array's memory if the array has
    this dtype already.
    """
    tensor = torch.as_tensor(array, dtype=dtype)
    if device.type == "cpu":
        return tensor
    accelerator = torch.get_device_module(device)
    copies, work = _stream_of_copies(device), accelerator.current_stream(device)
    with accelerator.stream(copies):
        there = tensor.pin_memory().to(device, non_blocking=True)
    work.wait_stream(copies)
    there.record_stream(work)  # its memory is not reused before that stream has finished with it
    return there


def mark(device: torch.device) -> Any:
    """Return an event after all work queued on `device` so far; None on a CPU, where nothing is queued."""
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device).record_event()


@cache
def _stream_of_copies(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def memory(device: torch.device) -> dict[str, int]:
    """Return current and peak bytes; on a CPU, the process's resident memory."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.memory_allocated(device),
            "peak_allocated": torch.cuda.max_memory_allocated(device),
            "peak_reserved": torch.cuda.max_memory_reserved(device),
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    return {"allocated": _resident(peak), "peak_allocated": peak, "peak_reserved": peak}


def _resident(peak: int) -> int:
    status = Path("/proc/self/statm")
    if not status.exists():  # not Linux: only the peak is available
        return peak
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "CPU"


@cache
def vendor_peak(device: torch.device) -> float | None:
    """Return the data sheet's dense bf16 FLOP/s of this accelerator, or None if it is not in gpus.yaml."""
    if device.type != "cuda":
        return None
    gpus, known = packaged_yaml("kenotron.parallel", "gpus.yaml").values(), name(device)
    return next((float(gpu["flops"]) for gpu in gpus if gpu["device"] in known), None)


def matmul_ceiling(device: torch.device, dtype: str) -> float:
    """Return the FLOP/s of the fastest of a few square matrix products in `dtype`: the machine's practical peak."""
    side = 8192 if device.type == "cuda" else 768
    # Random numbers, as in a run: with equal numbers a GPU needs less power, and multiplies 13% faster (H200).
    a = torch.arange(float(side * side), device=device).sin().view(side, side).to(getattr(torch, dtype))
    best = float("inf")
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        rows_by_matrix(a, a)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 / best
