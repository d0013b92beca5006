"""Short measurements: how fast this machine multiplies, copies, writes and reads. Each ends by itself within seconds.

matmul float32, matmul bfloat16    what a run's `matmul_share` is a share of: parallel.device.matmul_ceiling
copy                               bytes read plus bytes written per second, of tensors that no cache holds
write, read                        a file of 64 MiB, 4 on a slow disk, with fsync; read back, from the disk if possible
fsync                              4 KiB and fsync: what a checkpoint pays for each small file
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kenotron.doctor.facts import Speed
from kenotron.doctor.limited import Failed, call_limited

DEVICE_LIMIT_S, DISK_LIMIT_S = 45.0, 15.0
MEASURED_FOR_S = 1.5  # each: the fastest of a longer time is less disturbed by what else the machine does
COPIED = 256 << 20  # bytes; larger than the last cache of all but a few processors
CHUNK, CHUNKS = 4 << 20, 16
WRITE_FOR_S = 4.0  # a disk that would take longer, by the first chunk, gets no more than that
FSYNCS = 5


def device_speeds(device: str, environment: dict[str, str]) -> list[Speed]:
    """Matrix products and copies on ``cpu`` or ``cuda:1``, with the `environment` by which a process sees no other.

    A failure is a Speed with its problem.
    """
    kind = device.split(":")[0]  # the process sees only that one
    measured = _limited(DEVICE_LIMIT_S, measure_device, kind, environment=environment)
    units = {"matmul float32": "FLOP/s", "matmul bfloat16": "FLOP/s", "copy": "B/s"}
    return [_speed(what, device, unit, measured) for what, unit in units.items()]


def disk_speeds(folder: Path) -> tuple[list[Speed], float | None]:
    """Writing to and reading from `folder`, and how far its clock is ahead of this machine's (s)."""
    measured = _limited(DISK_LIMIT_S, measure_disk, str(folder))
    units = {"write": "B/s", "read": "B/s", "fsync": "s"}
    skew = measured.get("clock skew") if isinstance(measured, dict) else None
    return [_speed(what, "folder", unit, measured) for what, unit in units.items()], skew


def _limited(
    seconds: float, function: Callable[..., Any], *arguments: object, **options: Any
) -> dict[str, float] | str:
    try:
        return call_limited(function, *arguments, seconds=seconds, **options)
    except Failed as error:
        return str(error)


def _speed(what: str, where: str, unit: str, measured: dict[str, float] | str) -> Speed:
    if isinstance(measured, str):
        return Speed(what, where, None, unit, measured)
    return Speed(what, where, measured[what], unit)


def measure_device(name: str) -> dict[str, float]:
    """The numbers of `device_speeds`, in this process."""
    import torch

    from kenotron.parallel.device import matmul_ceiling

    device = torch.device(name)
    found = {f"matmul {dtype}": fastest(partial(matmul_ceiling, device, dtype)) for dtype in ("float32", "bfloat16")}
    return found | {"copy": copy_speed(device)}


def fastest(measure: Callable[[], float]) -> float:
    """The largest of what `measure` returns, called at least once and for `MEASURED_FOR_S`."""
    started = time.perf_counter()
    best = measure()
    while time.perf_counter() - started < MEASURED_FOR_S:
        best = max(best, measure())
    return best


def copy_speed(device: Any) -> float:
    """Bytes per second, read and written ones together, of the fastest copy of a large tensor."""
    import torch

    from kenotron.parallel.device import synchronize

    source = torch.ones(COPIED // 4, device=device)
    target = torch.zeros_like(source)  # its pages are there before the first copy

    def copy() -> float:
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        return 2 * COPIED / (time.perf_counter() - started)

    return fastest(copy)


def measure_disk(folder: str) -> dict[str, float]:
    """The numbers of `disk_speeds`, in this process."""
    content = os.urandom(CHUNK)  # file systems that compress gain nothing
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: it is gone with this process
        os.write(file.fileno(), b"now")
        skew = os.fstat(file.fileno()).st_mtime - time.time()  # the file system writes its own time
        descriptor = file.fileno()
        written, write_seconds = CHUNK, _write_seconds(descriptor, content, 1)
        if write_seconds * CHUNKS < WRITE_FOR_S:
            written, write_seconds = CHUNK * CHUNKS, _write_seconds(descriptor, content, CHUNKS)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        started, read = time.perf_counter(), 0
        while part := os.read(descriptor, CHUNK):
            read += len(part)
        read_seconds = time.perf_counter() - started
        synced = [_write_seconds(descriptor, bytes(4096), 1) for _ in range(FSYNCS)]
    return {
        "write": written / write_seconds,
        "read": read / read_seconds,
        "fsync": sorted(synced)[FSYNCS // 2],
        "clock skew": skew,
    }


def _write_seconds(descriptor: int, content: bytes, times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        os.write(descriptor, content)
    os.fsync(descriptor)
    return time.perf_counter() - started
