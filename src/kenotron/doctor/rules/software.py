"""Rules about versions and about settings of the software."""

from __future__ import annotations

import re

from kenotron.doctor.facts import Facts, Finding
from kenotron.doctor.rules.finding import error, hint, warning

TESTED_TORCH = (2, 14)  # the newest with which the quick tests passed; constraints.txt may name an older one
SLOW_IMPORT_S = 20.0
# Each makes every step wait or check; right while one hunts a bug, and often left behind.
FOR_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "HIP_LAUNCH_BLOCKING": ("1",),
    "AMD_SERIALIZE_KERNEL": ("3",),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "NCCL_DEBUG": ("INFO", "TRACE"),
    "PYTHONMALLOC": ("debug", "malloc_debug", "pymalloc_debug"),
}


def torch_does_not_import(facts: Facts) -> Finding | None:
    problem = facts.torch.problem
    if problem is None:
        return None
    return error(f"importing torch fails: {problem}", "install torch again: https://pytorch.org/get-started/locally")


def requirement_not_met(facts: Facts) -> Finding | None:
    unmet = facts.software.unmet
    if not unmet:
        return None
    return error(
        f"kenotron needs {', '.join(unmet)}", f"pip install {' '.join(repr(each.split()[0]) for each in unmet)}"
    )


def torch_nightly(facts: Facts) -> Finding | None:
    version = facts.torch.version
    if not re.search(r"\d(a\d|\.dev|rc\d)|git", version):
        return None
    return warning(f"torch {version} is not a stable release", "install a release; kenotron is tested on those")


def torch_newer_than_tested(facts: Facts) -> Finding | None:
    if numbers(facts.torch.version)[:2] <= TESTED_TORCH:
        return None
    tested = ".".join(map(str, TESTED_TORCH))
    return hint(f"torch {facts.torch.version} is newer than {tested}, the newest tested", "report what breaks")


def triton_mismatch(facts: Facts) -> Finding | None:
    wanted, found = facts.software.triton_wanted, facts.software.packages.get("triton")
    if wanted is None or found is None or wanted == found:
        return None
    return warning(
        f"triton {found} is installed, torch {facts.torch.version} was built for {wanted}: compiling fails in odd ways",
        f"pip install triton=={wanted}",
    )


def triton_missing(facts: Facts) -> Finding | None:
    if not facts.torch.accelerators or "triton" in facts.software.packages:
        return None
    return warning("triton is missing: model.compile: true fails on the GPU", "pip install triton")


def no_compiler(facts: Facts) -> Finding | None:
    software = facts.software
    if not software.system or (software.compiler and software.python_headers):
        return None
    missing = "a C++ compiler" if software.compiler is None else "Python.h"
    if facts.torch.accelerators:
        return warning(
            f"{missing} is missing, and Triton compiles with both: model.compile: true, _attn_implementation: "
            "flex_attention and model.kernels: triton fail on the GPU",
            "install g++ or clang, and Python's headers (python3-dev)",
        )
    return hint(
        f"{missing} is missing: model.compile: true cannot build kernels for the CPU",
        "install g++ or clang, and Python's headers (python3-dev), or leave model.compile off",
    )


def slow_import(facts: Facts) -> Finding | None:
    if facts.torch.import_seconds < SLOW_IMPORT_S or machine_busy(facts):
        return None
    return hint(
        f"importing torch took {facts.torch.import_seconds:.0f} s, as it does from network file systems",
        "put the Python environment on a local disk",
    )


def machine_busy(facts: Facts) -> Finding | None:
    load, cores = facts.processor.load, facts.processor.cores  # all of the machine, whose load it is
    if load is None or load < 1.5 * cores:
        return None
    return warning(
        f"other processes keep the machine busy (load {load:.1f} on {cores} cores): measured speeds are too low",
        "measure again on an idle machine",
    )


def old_kernel(facts: Facts) -> Finding | None:
    system = facts.software.system
    if not system.startswith("Linux") or numbers(system.split()[1])[:2] >= (5, 5):
        return None
    return warning(f"{system}: processes are known to hang on kernels before 5.5", "use a newer kernel")


def settings_for_debugging(facts: Facts) -> Finding | None:
    left = [
        f"{name}={facts.settings[name]}" for name, values in FOR_DEBUGGING.items() if facts.settings.get(name) in values
    ]
    if not left:
        return None
    return warning(f"{', '.join(left)}: made for debugging, and slow", "unset it")


def triton_interpreted(facts: Facts) -> Finding | None:
    if facts.settings.get("TRITON_INTERPRET", "0") in ("", "0"):
        return None
    return warning(
        "TRITON_INTERPRET is set: kernels are interpreted in Python, and bfloat16 dot products come out wrong",
        "unset it",
    )


def float32_rounded(facts: Facts) -> Finding | None:
    names = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
    on = [name for name in names if facts.settings.get(name) == "1"]
    if not on:
        return None
    return warning(
        f"{on[0]}=1 rounds float32 products to tf32: layouts of a float32 run agree to 1e-3 only",
        "unset it, and train with model.dtype: bfloat16 for speed",
    )


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of 2.13.0+cu130."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


RULES = (
    torch_does_not_import,
    requirement_not_met,
    torch_nightly,
    torch_newer_than_tested,
    triton_mismatch,
    triton_missing,
    no_compiler,
    slow_import,
    machine_busy,
    old_kernel,
    settings_for_debugging,
    triton_interpreted,
    float32_rounded,
)
