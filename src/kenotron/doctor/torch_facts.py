"""What torch says of itself and of its devices; runs in a process of its own, as either may crash or hang."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import Any

from kenotron.doctor.facts import Accelerator, Torch
from kenotron.doctor.settings import anonymous


def describe_torch() -> dict[str, Any]:
    """The fields of `Torch`."""
    started = time.perf_counter()
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing library of CUDA, or one for another processor
        return asdict(Torch(problem=anonymous(f"{type(error).__name__}: {error}".splitlines()[0])))
    seconds = time.perf_counter() - started
    import torch.distributed as dist

    config = torch.__config__.show()
    accelerators, problem = _accelerators(torch)
    found = Torch(
        version=torch.__version__,
        import_seconds=round(seconds, 2),
        cuda=torch.version.cuda,
        rocm=getattr(torch.version, "hip", None),
        architectures=torch.cuda.get_arch_list(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        blas=_first(r"BLAS_INFO=(\w+)", config),
        threads_by=_first(r"ATen parallel backend: (.+)", torch.__config__.parallel_info()),
        onednn=torch.backends.mkldnn.is_available(),
        threads=torch.get_num_threads(),
        interop_threads=torch.get_num_interop_threads(),
        backends=[name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available", bool)()],
        nccl=_nccl(torch),
        attention=_attention(torch, bool(accelerators)),
        accelerators=accelerators,
        accelerators_problem=problem,
        peers=_peers(torch, len(accelerators)),
        xpu=torch.xpu.get_device_name(0) if torch.xpu.is_available() else None,
    )
    return asdict(found)


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match.group(1) if match else ""


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, ImportError):  # a build for the CPU
        return None


def _attention(torch: Any, accelerated: bool) -> list[str]:
    """Kernels of scaled_dot_product_attention that are built in and enabled."""
    if not accelerated:
        return ["flash (cpu)", "math"] if torch.backends.cuda.flash_sdp_enabled() else ["math"]
    backends = torch.backends.cuda
    found = [
        ("flash", backends.is_flash_attention_available() and backends.flash_sdp_enabled()),
        ("cudnn", torch.backends.cudnn.is_available() and backends.cudnn_sdp_enabled()),
        ("memory-efficient", backends.mem_efficient_sdp_enabled()),
        ("math", backends.math_sdp_enabled()),
    ]
    return [name for name, there in found if there]


def _accelerators(torch: Any) -> tuple[list[Accelerator], str | None]:
    """The devices, or why a build for CUDA or ROCm has none."""
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return [], None
    try:
        torch.cuda.init()
        return [_accelerator(torch, number) for number in range(torch.cuda.device_count())], None
    except (RuntimeError, AssertionError) as error:
        return [], str(error).strip().splitlines()[0]


def _accelerator(torch: Any, number: int) -> Accelerator:
    properties = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    # In a build for CUDA, too, the properties have a gcnArchName: there it repeats the GPU's name.
    rocm = getattr(torch.version, "hip", None) is not None
    capability = properties.gcnArchName if rocm else f"{properties.major}.{properties.minor}"
    return Accelerator(properties.name, total, free, capability)


def _peers(torch: Any, count: int) -> list[list[bool]]:
    if count < 2:
        return []
    peer = torch.cuda.can_device_access_peer
    return [[one == other or peer(one, other) for other in range(count)] for one in range(count)]
