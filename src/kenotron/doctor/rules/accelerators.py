"""Rules about GPUs, their drivers and the links between them."""

from __future__ import annotations

import re

from kenotron.config.errors import counted
from kenotron.doctor.facts import Facts, Finding
from kenotron.doctor.rules.finding import error, hint, warning
from kenotron.doctor.rules.software import numbers
from kenotron.launch.environment import ALLOCATOR

OVER_THE_HOST = ("SYS", "NODE", "PHB")  # through the processor, not through NVLink or a PCIe switch

OWN_MEMORY = 1 << 30  # bytes; more than a CUDA context of this command takes


def torch_built_for_cpu(facts: Facts) -> Finding | None:
    torch = facts.torch
    if not facts.nvidia.gpus or not torch.version or torch.cuda is not None or torch.rocm is not None:
        return None
    there = counted(len(facts.nvidia.gpus), "GPU")
    return warning(
        f"the machine has {there}, but torch {torch.version} is built for the CPU only",
        "install torch for CUDA: https://pytorch.org/get-started/locally",
    )


def driver_too_old(facts: Facts) -> Finding | None:
    needed, runs = facts.torch.cuda, facts.nvidia.cuda
    if needed is None or runs is None or numbers(needed)[:1] <= numbers(runs)[:1] or facts.torch.accelerators:
        return None  # with NVIDIA's package for compatibility, an older driver will do
    return error(
        f"torch is built for CUDA {needed}, the driver {facts.nvidia.driver} runs CUDA {runs} at most",
        f"a newer driver, or torch for CUDA {numbers(runs)[0]}",
    )


def gpus_not_seen(facts: Facts) -> Finding | None:
    torch, settings = facts.torch, facts.settings
    built = torch.cuda is not None and bool(facts.nvidia.gpus)
    hidden = "CUDA_VISIBLE_DEVICES" in settings or settings.get("KENOTRON_DEVICE") == "cpu"
    if not built or torch.accelerators or hidden or driver_too_old(facts):
        return None
    there, why = counted(len(facts.nvidia.gpus), "GPU"), torch.accelerators_problem or "no reason given"
    return error(
        f"torch finds none of {there}: {why}",
        "look at dmesg for Xid errors; in a container: docker run --gpus all",
    )


def gpus_hidden(facts: Facts) -> Finding | None:
    seen, there = len(facts.torch.accelerators), len(facts.nvidia.gpus)
    visible = facts.settings.get("CUDA_VISIBLE_DEVICES")
    if facts.torch.cuda is None or visible is None or seen >= there:
        return None
    return hint(f"CUDA_VISIBLE_DEVICES={visible} shows {seen} of {there} GPUs", "unset it to use all")


def nvidia_smi_fails(facts: Facts) -> Finding | None:
    problem = facts.nvidia.problem
    if problem is None:
        return None
    return warning(problem, "look at dmesg for Xid errors; a GPU that fell off the bus needs a reboot")


def gpu_not_in_this_torch(facts: Facts) -> Finding | None:
    torch = facts.torch
    for gpu in torch.accelerators:
        if torch.cuda and torch.architectures and not _runs_on(torch.architectures, gpu.capability):
            return error(
                f"torch {torch.version} has no kernels for {gpu.name} (compute capability {gpu.capability}), only "
                f"{' '.join(torch.architectures)}",
                "install a torch for another version of CUDA",
            )
    return None


def _runs_on(architectures: list[str], capability: str) -> bool:
    """Machine code runs on its major version from its minor one on, compute_ code on all that are newer."""
    major, minor = numbers(capability)[:2]
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", architecture)
        if match is None:
            continue
        kind, built = match[1], (int(match[2]), int(match[3]))
        if (built[0] == major and built[1] <= minor) or (kind == "compute" and built <= (major, minor)):
            return True
    return False


def intel_gpu(facts: Facts) -> Finding | None:
    if facts.torch.xpu is None or facts.settings.get("KENOTRON_DEVICE") == "cpu":
        return None
    return error(f"{facts.torch.xpu}: Intel GPUs (XPU) are not supported", "KENOTRON_DEVICE=cpu trains on the CPU")


def no_bfloat16(facts: Facts) -> Finding | None:
    torch = facts.torch
    old = [gpu.name for gpu in torch.accelerators if torch.cuda and numbers(gpu.capability)[0] < 8]
    if not old:
        return None
    return warning(f"{old[0]} has no bfloat16 units: they are emulated, slowly", "model.dtype: float32 there")


def gpu_memory_taken(facts: Facts) -> Finding | None:
    for number, gpu in enumerate(facts.torch.accelerators):
        total, taken = gpu.memory_total, gpu.memory_total - gpu.memory_free
        if taken > max(total // 10, OWN_MEMORY):
            return warning(
                f"{taken / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU {number} are taken by other processes",
                "nvidia-smi lists them; a crashed run may still be alive",
            )
    return None


def no_peer_access(facts: Facts) -> Finding | None:
    pairs = [(one, other) for one, row in enumerate(facts.torch.peers) for other, can in enumerate(row) if not can]
    if not pairs:
        return None
    return warning(
        f"GPUs {pairs[0][0]} and {pairs[0][1]} cannot read each other's memory: NCCL goes through main memory",
        "in a virtual machine: pass the PCIe switch through, or disable ACS; else prefer dp and pp to tp",
    )


def links_over_the_host(facts: Facts) -> Finding | None:
    links = {link for row in facts.nvidia.links for link in row}
    slow = [link for link in OVER_THE_HOST if link in links]
    if not slow:
        return None
    return hint(
        f"some GPUs are connected through the processor ({slow[0]} in nvidia-smi topo -m)",
        "keep tp and cp within GPUs that NVLink or a PCIe switch connects; dp and pp need less",
    )


def memory_errors(facts: Facts) -> Finding | None:
    bad = [number for number, gpu in enumerate(facts.nvidia.gpus) if gpu.uncorrected_errors]
    if not bad:
        return None
    return error(
        f"GPU {bad[0]} had {facts.nvidia.gpus[bad[0]].uncorrected_errors} uncorrected memory errors: a run there ends",
        "leave it out (CUDA_VISIBLE_DEVICES), and have it reset or replaced",
    )


def persistence_off(facts: Facts) -> Finding | None:
    if not any(gpu.persistence is False for gpu in facts.nvidia.gpus):
        return None
    return hint("persistence mode is off: the driver is reloaded at each start", "nvidia-smi -pm 1, as root")


def power_capped(facts: Facts) -> Finding | None:
    for number, gpu in enumerate(facts.nvidia.gpus):
        if gpu.power_limit is not None and gpu.power_default is not None and gpu.power_limit < gpu.power_default:
            return warning(
                f"GPU {number} may draw {gpu.power_limit:.0f} W of the usual {gpu.power_default:.0f}: it is slower",
                "nvidia-smi -pl, as root",
            )
    return None


def narrow_pcie(facts: Facts) -> Finding | None:
    for number, gpu in enumerate(facts.nvidia.gpus):
        if gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max:
            return hint(
                f"GPU {number} has {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes: copies to it are slower",
                "try another slot; a riser or a dirty contact has the same effect",
            )
    return None


def mig_on(facts: Facts) -> Finding | None:
    if not any(gpu.mig for gpu in facts.nvidia.gpus):
        return None
    return warning("MIG splits a GPU: ranks on its instances cannot use NCCL between each other", "nvidia-smi -mig 0")


def fragmenting_allocator(facts: Facts) -> Finding | None:
    configured = [f"{name}={facts.settings[name]}" for name in ALLOCATOR if name in facts.settings]
    if not configured or facts.torch.cuda is None or "expandable_segments:true" in configured[0].lower():
        return None  # where neither is set, a run sets it
    return hint(
        f"{configured[0]}: torch's allocator may lose GPU memory to fragmentation, with packed documents most",
        "add expandable_segments:True, or unset it: a run then sets that",
    )


def one_connection(facts: Facts) -> Finding | None:
    if facts.settings.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return None
    return warning(
        "CUDA_DEVICE_MAX_CONNECTIONS=1, from recipes for Megatron, keeps FSDP from communicating while it computes",
        "unset it",
    )


RULES = (
    torch_built_for_cpu,
    driver_too_old,
    gpus_not_seen,
    gpus_hidden,
    nvidia_smi_fails,
    gpu_not_in_this_torch,
    intel_gpu,
    no_bfloat16,
    gpu_memory_taken,
    no_peer_access,
    links_over_the_host,
    memory_errors,
    persistence_off,
    power_capped,
    narrow_pcie,
    mig_on,
    fragmenting_allocator,
    one_connection,
)
