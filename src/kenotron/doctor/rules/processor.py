"""Rules about cores, threads and the kernels that a CPU's matrix products take."""

from __future__ import annotations

from kenotron.config.errors import counted
from kenotron.doctor.facts import Facts, Finding
from kenotron.doctor.rules.finding import hint, warning
from kenotron.doctor.rules.software import machine_busy

# Each keeps oneDNN, MKL or torch from newer instructions than it names.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY")
BINDINGS = {
    "OMP_PROC_BIND": lambda value: value.lower() != "false",
    "GOMP_CPU_AFFINITY": lambda value: True,
    "KMP_AFFINITY": lambda value: not {"none", "disabled"} & set(value.lower().split(",")),
}
CLEARLY = 1.3  # times as fast


def cores_unused(facts: Facts) -> Finding | None:
    threads, usable = facts.torch.threads, facts.processor.usable
    if not 0 < threads < usable or facts.torch.accelerators:
        return None
    limit = next((name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in facts.settings), None)
    because = f" because of {limit}={facts.settings[limit]}" if limit else ""
    return hint(
        f"torch computes with {threads} of {usable} cores{because}",
        "unset it: kenotron gives each local rank its share" if limit else f"OMP_NUM_THREADS={usable}",
    )


def too_many_threads(facts: Facts) -> Finding | None:
    threads, processor = facts.torch.threads, facts.processor
    if not processor.usable or threads <= processor.usable:
        return None
    quota = processor.quota is not None and processor.quota < processor.allowed
    by = f"the cgroup's quota of {processor.quota:g}" if quota else "the affinity"
    return warning(
        f"torch starts {threads} threads, but {by} allows {counted(processor.usable, 'core')}: they take turns",
        f"OMP_NUM_THREADS={processor.usable}",
    )


def threads_bound(facts: Facts) -> Finding | None:
    bound = [name for name, binds in BINDINGS.items() if name in facts.settings and binds(facts.settings[name])]
    if not bound:
        return None
    return warning(
        f"{bound[0]}={facts.settings[bound[0]]} is inherited by all local ranks, which are bound to the same cores",
        "unset it; bind ranks with taskset, numactl or srun --cpu-bind instead",
    )


def instructions_limited(facts: Facts) -> Finding | None:
    limits = [name for name in INSTRUCTION_LIMITS if facts.settings.get(name, "ALL").upper() not in ("ALL", "DEFAULT")]
    if not limits:
        return None
    return warning(
        f"{limits[0]}={facts.settings[limits[0]]} keeps newer instructions from being used: bfloat16 products without "
        "avx512_bf16 take 6 times as long",
        "unset it",
    )


def no_onednn(facts: Facts) -> Finding | None:
    torch = facts.torch
    if torch.onednn or not torch.version or torch.accelerators or not facts.software.system.endswith("x86_64"):
        return None
    return warning("this torch was built without oneDNN: bfloat16 on its CPU is many times slower", "install a release")


def bfloat16_is_faster(facts: Facts) -> Finding | None:
    ratio = _bfloat16_ratio(facts)
    if ratio is None or ratio < CLEARLY:
        return None
    return hint(f"matrix products in bfloat16 are {ratio:.1f} times as fast as in float32", "model.dtype: bfloat16")


def float32_is_faster(facts: Facts) -> Finding | None:
    ratio = _bfloat16_ratio(facts)
    if ratio is None or ratio > 1 / CLEARLY:
        return None
    return hint(
        f"this processor has no fast bfloat16: matrix products in float32 are {1 / ratio:.1f} times as fast",
        "model.dtype: float32",
    )


def _bfloat16_ratio(facts: Facts) -> float | None:
    """How much faster bfloat16 is on the CPU that trains; None if another device does, or it was not measured well."""
    if facts.torch.accelerators or machine_busy(facts):
        return None
    slow, fast = facts.speed("matmul float32", "cpu"), facts.speed("matmul bfloat16", "cpu")
    return fast / slow if slow and fast else None


RULES = (
    cores_unused,
    too_many_threads,
    threads_bound,
    instructions_limited,
    no_onednn,
    bfloat16_is_faster,
    float32_is_faster,
)
