"""The facts that need no torch: /proc and /sys, nvidia-smi, the limits of this process, versions of what is installed.

Each function returns one section of `Facts`; where a system keeps no such file, its fields stay None.
"""

import os
import platform
import re
import resource
import shutil
import subprocess
import sysconfig
import tempfile
import time
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import kenotron
from kenotron.doctor.facts import Disk, Limits, Memory, Network, Nvidia, Processor, Software
from kenotron.doctor.limited import Failed, call_limited
from kenotron.kernels.cores import cores_by_affinity
from kenotron.launch.machine_memory import available_memory, memory_of_cgroup, processor_quota, system_file

PACKAGES = ["torch", "triton", "numpy", "transformers", "tokenizers", "datasets", "safetensors", "pydantic", "fsspec"]
KERNEL_PACKAGES = ["flash-attn", "mamba-ssm", "causal-conv1d"]  # which a run uses where they are installed
# Of hundreds of flags, those that matrix products choose their kernels by.
INSTRUCTIONS = ["avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "sve2", "bf16", "i8mm"]
DISK_LIMIT_S = 15.0
NVIDIA_SMI_LIMIT_S = 15.0  # a driver with a GPU that fell off the bus never answers


def software() -> Software:
    """Versions by their metadata: nothing is imported."""
    found = {name: installed for name in [*PACKAGES, *KERNEL_PACKAGES] if (installed := _version(name)) is not None}
    compilers = [os.environ.get("CXX", "c++"), "c++", "g++", "clang++"]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Software(
        kenotron=kenotron.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        libc=" ".join(platform.libc_ver()).strip(),
        packages=found,
        unmet=_unmet(),
        triton_wanted=_triton_wanted(),
        compiler=next((name for name in compilers if shutil.which(name) is not None), None),
        python_headers=headers.exists(),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _requirements(package: str) -> list[str]:
    try:
        return requires(package) or []
    except PackageNotFoundError:  # not installed, or run from its sources
        return []


def _unmet() -> list[str]:
    """Requirements of this package that what is installed does not meet."""
    from packaging.requirements import Requirement

    unmet = []
    for requirement in map(Requirement, _requirements("kenotron")):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append(f"{requirement.name}{requirement.specifier} (found {found or 'none'})")
    return unmet


def _triton_wanted() -> str | None:
    """The exact version of triton in torch's metadata; a build for the CPU asks for none."""
    found = [re.match(r"(?:pytorch-)?triton\s*==\s*([^;\s]+)", line) for line in _requirements("torch")]
    return next((match.group(1) for match in found if match), None)


def processor() -> Processor:
    """Cores by affinity and by cgroup, and the instructions that matrix products are chosen by."""
    text = system_file("/proc/cpuinfo") or ""
    flags = set((_field(text, "flags") or _field(text, "Features") or "").split())
    return Processor(
        name=_field(text, "model name") or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        allowed=cores_by_affinity(),
        quota=processor_quota(),
        instructions=[name for name in INSTRUCTIONS if name in flags],
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else None


def memory() -> Memory:
    """Memory by /proc/meminfo, within the cgroup's limit."""
    return Memory(
        total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available=available_memory(),
        limit=memory_of_cgroup()[0],
        shm_total=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    )


def nvidia() -> Nvidia:
    """NVIDIA's driver and GPUs, which nvidia-smi also describes where torch cannot use them."""
    if shutil.which("nvidia-smi") is None:
        return Nvidia()
    try:
        driver, cuda = versions_of(_ask_nvidia_smi())
        gpus, mig = gpus_of(_ask_nvidia_smi("--query-gpu=name,mig.mode.current", "--format=csv,noheader"))
    except subprocess.TimeoutExpired:
        return Nvidia(problem=f"nvidia-smi gave no answer within {NVIDIA_SMI_LIMIT_S:g} s")
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stdout", None) or str(error)).strip().splitlines()
        return Nvidia(problem=f"nvidia-smi: {said[-1] if said else error}")
    return Nvidia(driver=driver, cuda=cuda, gpus=gpus, mig=mig)


def _ask_nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True, stdin=subprocess.DEVNULL
    )
    return done.stdout


def versions_of(text: str) -> tuple[str | None, str | None]:
    """Driver and newest CUDA runtime in the head of nvidia-smi's page."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA (?:\w+ )?Version:\s*([\d.]+)", text)
    return driver.group(1) if driver else None, cuda.group(1) if cuda else None


def gpus_of(text: str) -> tuple[list[str], bool]:
    """The names of the GPUs in lines like ``NVIDIA H100 80GB HBM3, Disabled``, and whether one is split by MIG."""
    lines = [line.split(",") for line in text.splitlines() if "," in line]
    return [line[0].strip() for line in lines], any(line[-1].strip() == "Enabled" for line in lines)


def disk(folder: Path) -> Disk:
    """Space and kind of the file system of `folder`, where a file is written."""
    try:
        return Disk(**call_limited(describe_disk, str(folder.absolute()), seconds=DISK_LIMIT_S))
    except Failed as error:
        return Disk(problem=str(error))


def describe_disk(folder: str) -> dict[str, Any]:
    """Fields of `Disk`, asked in a process of its own: a file server that is gone never answers."""
    with tempfile.TemporaryFile(dir=folder) as file:  # without a name: it is gone with this process
        os.write(file.fileno(), b"now")
        skew = os.fstat(file.fileno()).st_mtime - time.time()  # the file system writes its own time
        os.fsync(file.fileno())
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder)
    return {
        "filesystem": _filesystem(Path(folder).resolve()),
        "total": usage.total,
        "free": usage.free,
        "files_free": files.f_favail if files.f_files else None,
        "clock_skew": skew,
    }


def _filesystem(folder: Path) -> str | None:
    """The kind of the deepest mount above `folder`: ext4, nfs4, lustre, overlay, tmpfs."""
    mounts = [line.split() for line in (system_file("/proc/mounts") or "").splitlines()]
    above = [(len(words[1]), number, words[2]) for number, words in enumerate(mounts) if _is_below(folder, words[1])]
    return max(above)[2] if above else None


def _is_below(folder: Path, mount: str) -> bool:
    return folder.is_relative_to(mount.encode().decode("unicode_escape"))  # a space is \040


def network() -> Network:
    """Interfaces that are up, and InfiniBand ports."""
    links = sorted(Path("/sys/class/net").glob("*"))
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    up = [link.name for link in links if system_file(link / "operstate") in ("up", "unknown")]
    active = [port for port in ports if "ACTIVE" in (system_file(port / "state") or "")]
    return Network(
        interfaces=[name for name in up if name != "lo"],
        infiniband=[f"{port.parent.parent.name}:{port.name}" for port in active],
    )


def limits() -> Limits:
    """Those of ranks: the soft limit of locked memory, and of open files the hard one, to which a rank raises it."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Limits(*(None if limit == resource.RLIM_INFINITY else limit for limit in found))
