"""Collect the facts that do not need torch, from /proc and /sys, nvidia-smi, this process's limits, package metadata.

Each function returns one section of `Facts`; fields stay None if a system does not have the file.
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
KERNEL_PACKAGES = ["flash-attn", "mamba-ssm", "causal-conv1d"]  # used by a run if they are installed
# The flags by which matrix products choose their kernels.
INSTRUCTIONS = ["avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "sve2", "bf16", "i8mm"]
DISK_LIMIT_S = 15.0
NVIDIA_SMI_LIMIT_S = 15.0  # a driver with a GPU that fell off the bus never answers


def software() -> Software:
    """Return versions from package metadata, without importing the packages."""
    versions = {name: _version(name) for name in [*PACKAGES, *KERNEL_PACKAGES]}
    compilers = [os.environ.get("CXX", "c++"), "c++", "g++", "clang++"]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Software(
        kenotron=kenotron.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        libc=" ".join(platform.libc_ver()).strip(),
        packages={name: installed for name, installed in versions.items() if installed is not None},
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
    """Return the requirements of this package that the installed versions do not meet."""
    from packaging.requirements import Requirement

    unmet = []
    for requirement in map(Requirement, _requirements("kenotron")):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(f"{requirement.name}{requirement.specifier} (found {installed or 'none'})")
    return unmet


def _triton_wanted() -> str | None:
    """Return the exact version of triton that torch's metadata requires; a build for the CPU requires none."""
    matches = [re.match(r"(?:pytorch-)?triton\s*==\s*([^;\s]+)", line) for line in _requirements("torch")]
    return next((match.group(1) for match in matches if match), None)


def processor() -> Processor:
    """Return the cores by affinity and by cgroup, and the instructions for matrix products."""
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
    """Return the memory of /proc/meminfo, within the cgroup's limit."""
    return Memory(
        total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available=available_memory(),
        limit=memory_of_cgroup()[0],
        shm_total=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    )


def nvidia() -> Nvidia:
    """Return NVIDIA's driver and GPUs from nvidia-smi, which lists them even if torch cannot use them."""
    if shutil.which("nvidia-smi") is None:
        return Nvidia()
    try:
        driver, cuda = parse_versions(_run_nvidia_smi())
        gpus, mig = parse_gpus(_run_nvidia_smi("--query-gpu=name,mig.mode.current", "--format=csv,noheader"))
    except subprocess.TimeoutExpired:
        return Nvidia(problem=f"nvidia-smi gave no answer within {NVIDIA_SMI_LIMIT_S:g} s")
    except (subprocess.CalledProcessError, OSError) as error:
        output = (getattr(error, "stdout", None) or str(error)).strip().splitlines()
        return Nvidia(problem=f"nvidia-smi: {output[-1] if output else error}")
    return Nvidia(driver=driver, cuda=cuda, gpus=gpus, mig=mig)


def _run_nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True, stdin=subprocess.DEVNULL
    )
    return result.stdout


def parse_versions(text: str) -> tuple[str | None, str | None]:
    """Return the driver and the newest CUDA runtime from the head of nvidia-smi's page."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA (?:\w+ )?Version:\s*([\d.]+)", text)
    return driver.group(1) if driver else None, cuda.group(1) if cuda else None


def parse_gpus(text: str) -> tuple[list[str], bool]:
    """Return the names of the GPUs in lines like ``NVIDIA H100 80GB HBM3, Disabled``, and whether MIG is on for one."""
    lines = [line.split(",") for line in text.splitlines() if "," in line]
    return [line[0].strip() for line in lines], any(line[-1].strip() == "Enabled" for line in lines)


def disk(folder: Path) -> Disk:
    """Return space and kind of the file system of `folder`, after writing a file there."""
    try:
        return Disk(**call_limited(describe_disk, str(folder.absolute()), seconds=DISK_LIMIT_S))
    except Failed as error:
        return Disk(problem=str(error))


def describe_disk(folder: str) -> dict[str, Any]:
    """Return the fields of `Disk`. Call it in a separate process, because a file server that is down never answers."""
    with tempfile.TemporaryFile(dir=folder) as file:  # has no name, so it is removed with this process
        os.write(file.fileno(), b"now")
        skew = os.fstat(file.fileno()).st_mtime - time.time()  # st_mtime is from the file system's clock
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
    """Return the kind of the innermost mount around `folder`: ext4, nfs4, lustre, overlay, tmpfs."""
    mounts = (line.split() for line in (system_file("/proc/mounts") or "").splitlines())
    kinds = {mount.encode().decode("unicode_escape"): kind for _, mount, kind, *_ in mounts}  # a space is \040
    return kinds.get(max(filter(folder.is_relative_to, kinds), key=len, default=""))


def network() -> Network:
    """Return the interfaces that are up, and the active InfiniBand ports."""
    links = sorted(Path("/sys/class/net").glob("*"))
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    up = [link.name for link in links if system_file(link / "operstate") in ("up", "unknown")]
    active = [port for port in ports if "ACTIVE" in (system_file(port / "state") or "")]
    return Network(
        interfaces=[name for name in up if name != "lo"],
        infiniband=[f"{port.parent.parent.name}:{port.name}" for port in active],
    )


def limits() -> Limits:
    """Return the limits of ranks: soft for locked memory, hard for open files, because a rank raises its soft limit."""
    values = resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Limits(*(None if limit == resource.RLIM_INFINITY else limit for limit in values))
