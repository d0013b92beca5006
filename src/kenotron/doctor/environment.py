"""The facts that need no torch: files of /proc and /sys, the limits of this process, versions of what is installed.

Each function returns one section of `Facts`; where a system keeps no such file, its fields stay None.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sysconfig
import threading
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import kenotron
from kenotron.doctor.facts import Disk, InfinibandPort, Interface, Limits, Memory, Network, Processor, Software
from kenotron.doctor.limited import Failed, call_limited
from kenotron.launch.environment import cores_by_affinity
from kenotron.launch.machine_memory import available_memory, memory_of_cgroup, processor_quota, system_file

PACKAGES = [
    "torch",
    "triton",
    "numpy",
    "transformers",
    "tokenizers",
    "datasets",
    "safetensors",
    "pydantic",
    "fsspec",
    "flash-attn",
    "mamba-ssm",
    "causal-conv1d",
    "liger-kernel",
    "torchao",
]
# Of hundreds of flags, those that matrix products choose their kernels by.
INSTRUCTIONS = ["avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "sve2", "bf16", "i8mm"]
NAME_RESOLVES_WITHIN_S = 3.0
DISK_LIMIT_S = 15.0


def software() -> Software:
    """Versions by their metadata: nothing is imported."""
    found = {name: installed for name in PACKAGES if (installed := _version(name)) is not None}
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return Software(
        kenotron=kenotron.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        libc=" ".join(platform.libc_ver()).strip(),
        packages=found,
        unmet=_unmet(),
        triton_wanted=_triton_wanted(),
        compiler=next((name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if _program(name)), None),
        python_headers=headers.exists(),
    )


def _program(name: str | None) -> bool:
    return bool(name) and shutil.which(name or "") is not None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _unmet() -> list[str]:
    """Requirements of this package that what is installed does not meet."""
    from packaging.requirements import InvalidRequirement, Requirement

    unmet = []
    try:
        lines = requires("kenotron") or []
    except PackageNotFoundError:  # run from its sources
        return []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append(f"{requirement.name}{requirement.specifier} (found {found or 'none'})")
    return unmet


def _triton_wanted() -> str | None:
    """The exact version of triton in torch's metadata; a build for the CPU asks for none."""
    try:
        lines = requires("torch") or []
    except PackageNotFoundError:
        return None
    found = [re.match(r"(?:pytorch-)?triton\s*==\s*([^;\s]+)", line) for line in lines]
    return next((match.group(1) for match in found if match), None)


def processor() -> Processor:
    """Cores by affinity and by cgroup, and the instructions that matrix products are chosen by."""
    text = system_file("/proc/cpuinfo") or ""
    flags = set((_field(text, "flags") or _field(text, "Features") or "").split())
    sockets = set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.MULTILINE))
    return Processor(
        name=_field(text, "model name") or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        allowed=cores_by_affinity(),
        quota=processor_quota(),
        sockets=len(sockets) or None,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        instructions=[name for name in INSTRUCTIONS if name in flags],
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1).strip() if match else None


def memory() -> Memory:
    """Memory by /proc/meminfo, within the cgroup's limit."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", system_file("/proc/meminfo") or "", re.MULTILINE)
    size = {name: int(kilobytes) * 1024 for name, kilobytes in lines}
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    pages = re.search(r"\[(\w+)\]", system_file("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return Memory(
        total=size.get("MemTotal", 0) or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available=available_memory(),
        limit=memory_of_cgroup()[0],
        swap_total=size.get("SwapTotal", 0),
        swap_used=size.get("SwapTotal", 0) - size.get("SwapFree", 0),
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        huge_pages=pages.group(1) if pages else None,
        malloc=_malloc(os.environ.get("LD_PRELOAD", "")),
    )


def _malloc(preloaded: str) -> str:
    known = [name for name in ("jemalloc", "tcmalloc", "mimalloc") if name in preloaded]
    return known[0] if known else platform.libc_ver()[0] or platform.system()


def disk(folder: Path) -> Disk:
    """Space and kind of the file system of `folder`."""
    try:
        return Disk(**call_limited(describe_disk, str(folder.absolute()), seconds=DISK_LIMIT_S))
    except Failed as error:
        return Disk(problem=str(error))


def describe_disk(folder: str) -> dict[str, Any]:
    """Fields of `Disk`, asked in a process of its own: a file server that is gone never answers."""
    usage = shutil.disk_usage(folder)
    files = os.statvfs(folder) if hasattr(os, "statvfs") else None
    return {
        "filesystem": _filesystem(Path(folder).resolve()),
        "total": usage.total,
        "free": usage.free,
        "files_free": files.f_favail if files is not None and files.f_files else None,
    }


def _filesystem(folder: Path) -> str | None:
    """The kind of the deepest mount above `folder`: ext4, nfs4, lustre, overlay, tmpfs."""
    mounts = [line.split() for line in (system_file("/proc/mounts") or "").splitlines()]
    above = [(len(words[1]), number, words[2]) for number, words in enumerate(mounts) if _is_below(folder, words[1])]
    return max(above)[2] if above else None


def _is_below(folder: Path, mount: str) -> bool:
    return folder.is_relative_to(mount.encode().decode("unicode_escape"))  # a space is \040


def network() -> Network:
    """Interfaces that are up, InfiniBand ports, and whether this machine finds itself by its name."""
    interfaces = []
    for folder in sorted(Path("/sys/class/net").glob("*")):
        if folder.name != "lo" and system_file(folder / "operstate") in ("up", "unknown"):
            speed, mtu = system_file(folder / "speed") or "", system_file(folder / "mtu") or ""
            interfaces.append(
                Interface(folder.name, int(speed) if speed.isdigit() else None, int(mtu) if mtu.isdigit() else None)
            )
    ports = []
    for folder in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        name = f"{folder.parent.parent.name}:{folder.name}"
        ports.append(
            InfinibandPort(name, "ACTIVE" in (system_file(folder / "state") or ""), system_file(folder / "rate") or "")
        )
    return Network(interfaces, ports, _own_name())


def _own_name() -> str | None:
    """What the machine's name resolves to; None when there is no answer in time."""
    found: list[str] = []

    def resolve() -> None:
        try:
            addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
        except OSError:
            found.append("nothing")
            return
        loopback = all(str(address).startswith("127.") or address == "::1" for address in addresses)
        found.append("loopback" if loopback else "address")

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(NAME_RESOLVES_WITHIN_S)
    return found[0] if found else None


def limits() -> Limits:
    """Those of ranks: the soft ones of this process, and of open files the hard one, to which a rank raises it."""

    def limit(kind: int, hard: bool = False) -> int | None:
        value = resource.getrlimit(kind)[hard]
        return None if value == resource.RLIM_INFINITY else value

    open_files = limit(resource.RLIMIT_NOFILE, hard=True)
    return Limits(open_files, limit(resource.RLIMIT_NPROC), limit(resource.RLIMIT_MEMLOCK))
