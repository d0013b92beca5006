"""GPUs that a run may be planned for, by the names that `kenotron plan --gpu` takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kenotron.config.errors import InputError, nearest
from kenotron.config.parallelism import stays_on_cpu

GIB = 1 << 30


class Gpu(NamedTuple):
    """A GPU as torch sees it: one of two dies of an MI250X. `memory_gib`: total, as drivers report it."""

    name: str
    memory_gib: float
    vendor: str
    capability: tuple[int, int] = (0, 0)


GPUS = {
    "rtx4090": Gpu("RTX 4090", 23.5, "nvidia", (8, 9)),
    "l40s": Gpu("L40S", 44.4, "nvidia", (8, 9)),
    "a100-40gb": Gpu("A100 40 GB", 39.4, "nvidia", (8, 0)),
    "a100": Gpu("A100 80 GB", 79.1, "nvidia", (8, 0)),
    "h100": Gpu("H100 80 GB", 79.1, "nvidia", (9, 0)),
    "h200": Gpu("H200", 139.8, "nvidia", (9, 0)),
    "b200": Gpu("B200", 178.3, "nvidia", (10, 0)),
    "gb200": Gpu("GB200", 184.0, "nvidia", (10, 0)),
    "mi250x": Gpu("MI250X, one die", 64.0, "amd"),
    "mi300x": Gpu("MI300X", 192.0, "amd"),
}


def gpu_called(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises InputError with the names that there are."""
    if (found := GPUS.get(name.lower())) is None:
        raise InputError(f"--gpu: expected {', '.join(GPUS)}, found {name!r}{nearest(name.lower(), GPUS)}")
    return found


def gpu_here() -> Gpu | None:
    """The first GPU of this machine; None where runs use the CPU."""
    if stays_on_cpu() or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    if torch.version.hip:
        return Gpu(found.name, found.total_memory / GIB, "amd")
    return Gpu(found.name, found.total_memory / GIB, "nvidia", (found.major, found.minor))
