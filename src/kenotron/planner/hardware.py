"""GPUs that a run may be planned for, by the names that `kenotron plan --gpu` takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kenotron.config.errors import InputError, nearest
from kenotron.config.parallelism import stays_on_cpu

GIB = 1 << 30


class Gpu(NamedTuple):
    """A GPU as torch sees it: one of two dies of an MI250X. `memory_gib`: total, as drivers report it.

    By the vendors' data sheets, a second: `flops` of dense bf16 products and `fp32` ones (without tf32), `bandwidth` of
    its memory in bytes, and those that it can send to others of its machine (`link`) and to other machines (`network`,
    usual ones: machines are built with others, too). `processors`: units that blocks of a product are spread over.
    """

    name: str
    memory_gib: float
    vendor: str
    capability: tuple[int, int] = (0, 0)
    flops: float = 0.0
    fp32: float = 0.0
    bandwidth: float = 0.0
    processors: int = 1
    link: float = 0.0
    network: float = 0.0
    watts: float = 0.0
    in_machine: int = 8


GPUS = {
    "rtx4090": Gpu("RTX 4090", 23.5, "nvidia", (8, 9), 165e12, 83e12, 1.01e12, 128, 32e9, 12.5e9, 450),
    "l40s": Gpu("L40S", 44.4, "nvidia", (8, 9), 362e12, 92e12, 0.86e12, 142, 32e9, 25e9, 350),
    "a100-40gb": Gpu("A100 40 GB", 39.4, "nvidia", (8, 0), 312e12, 19.5e12, 1.56e12, 108, 300e9, 25e9, 400),
    "a100": Gpu("A100 80 GB", 79.1, "nvidia", (8, 0), 312e12, 19.5e12, 2.04e12, 108, 300e9, 25e9, 400),
    "h100": Gpu("H100 80 GB", 79.1, "nvidia", (9, 0), 989e12, 67e12, 3.35e12, 132, 450e9, 50e9, 700),
    "h200": Gpu("H200", 139.8, "nvidia", (9, 0), 989e12, 67e12, 4.8e12, 132, 450e9, 50e9, 700),
    "b200": Gpu("B200", 178.3, "nvidia", (10, 0), 2250e12, 75e12, 8.0e12, 148, 900e9, 50e9, 1000),
    "gb200": Gpu("GB200", 184.0, "nvidia", (10, 0), 2500e12, 80e12, 8.0e12, 152, 900e9, 50e9, 1200, 72),
    "mi250x": Gpu("MI250X, one die", 64.0, "amd", (0, 0), 191.5e12, 48e12, 1.6e12, 110, 100e9, 12.5e9, 280),
    "mi300x": Gpu("MI300X", 192.0, "amd", (0, 0), 1307e12, 163e12, 5.3e12, 304, 448e9, 50e9, 750),
}


def gpu_called(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises InputError with the names that there are."""
    if (found := GPUS.get(name.lower())) is None:
        raise InputError(f"--gpu: expected {', '.join(GPUS)}, found {name!r}{nearest(name.lower(), GPUS)}")
    return found


def gpu_here() -> Gpu | None:
    """The first GPU of this machine; None where runs use the CPU. Of a kind that is not in `GPUS` only the memory."""
    if stays_on_cpu() or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    vendor, capability = ("amd", (0, 0)) if torch.version.hip else ("nvidia", (found.major, found.minor))
    memory = found.total_memory / GIB
    alike = [gpu for gpu in GPUS.values() if gpu.name.split(",")[0].split()[0] in found.name.split()]
    if not alike:
        return Gpu(found.name, memory, vendor, capability)
    nearest_memory = min(alike, key=lambda gpu: abs(gpu.memory_gib - memory))
    return nearest_memory._replace(name=found.name, memory_gib=memory, capability=capability)
