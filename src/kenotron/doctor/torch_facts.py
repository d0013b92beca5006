"""Collect the facts about torch and its devices, in a separate process, because both may crash or hang."""

import re
from dataclasses import asdict
from typing import Any

from kenotron.doctor.facts import Accelerator, Torch
from kenotron.doctor.settings import anonymous


def describe_torch() -> dict[str, Any]:
    """Return the fields of `Torch`."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a missing CUDA library, or a library for another processor
        return asdict(Torch(problem=anonymous(f"{type(error).__name__}: {error}".splitlines()[0])))
    import torch.distributed as dist

    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    accelerators, problem = _accelerators(torch)
    facts = Torch(
        version=torch.__version__,
        cuda=torch.version.cuda,
        rocm=getattr(torch.version, "hip", None),
        architectures=torch.cuda.get_arch_list(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        blas=blas.group(1) if blas else "",
        onednn=torch.backends.mkldnn.is_available(),
        threads=torch.get_num_threads(),
        backends=[name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available", bool)()],
        nccl=_nccl(torch),
        accelerators=accelerators,
        accelerators_problem=problem,
    )
    return asdict(facts)


def _nccl(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, ImportError):  # a build for the CPU
        return None


def _accelerators(torch: Any) -> tuple[list[Accelerator], str | None]:
    """Return the devices, and the reason why a build for CUDA or ROCm has none."""
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
    # A build for CUDA has a gcnArchName, too, which repeats the GPU's name.
    rocm = getattr(torch.version, "hip", None) is not None
    capability = properties.gcnArchName if rocm else f"{properties.major}.{properties.minor}"
    return Accelerator(properties.name, total, free, capability)
