"""The memory and processor time of this machine, within the limits of containers and Slurm jobs (cgroups)."""

import re
from pathlib import Path

UNLIMITED = 1 << 60  # cgroup v1 has a huge number for no limit


def available_memory() -> int | None:
    """Return the bytes that processes may still allocate without swapping, or None if they are unknown."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", system_file("/proc/meminfo") or "", re.MULTILINE)
    limit, used = memory_of_cgroup()
    if match is None:
        return None
    available = int(match.group(1)) * 1024
    return available if limit is None else min(available, max(limit - used, 0))


def out_of_memory_kills() -> int | None:
    """Return how many processes the kernel has killed since boot because a machine, container or job lacked memory.

    Return None if it does not count them.
    """
    match = re.search(r"^oom_kill (\d+)", system_file("/proc/vmstat") or "", re.MULTILINE)
    return int(match.group(1)) if match else None


def memory_of_cgroup() -> tuple[int | None, int]:
    """Return limit and use in bytes of the cgroup or parent with the least free memory; caches count as free."""
    groups: list[tuple[int, int]] = []
    for folder in cgroup_folders("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            text = system_file(folder / limit) or ""
            if text.isdigit() and int(text) < UNLIMITED:
                stat = system_file(folder / "memory.stat") or ""
                sizes = dict(re.findall(r"^(?:total_)?(\w+) (\d+)$", stat, re.MULTILINE))  # version 1: total_ last
                caches = sum(int(sizes.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable"))
                groups.append((int(text), max(int(system_file(folder / used) or 0) - caches, 0)))
    return min(groups, key=lambda group: group[0] - group[1], default=(None, 0))


def processor_quota() -> float | None:
    """Return the limit on processor time in cores, of the innermost cgroup that has one, or None."""
    for folder in cgroup_folders("cpu"):
        limits = (system_file(folder / "cpu.max") or "").split()  # version 2: "200000 100000" or "max 100000"
        if len(limits) != 2:
            limits = [system_file(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        quota, period = limits
        if quota.isdigit() and period.isdigit() and int(period):
            return int(quota) / int(period)
    return None


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and its parents, of version 1 if it has `controller`, else of 2."""
    root, inside = Path("/sys/fs/cgroup"), "/"
    for line in (system_file("/proc/self/cgroup") or "").splitlines():  # "4:memory:/job" of version 1, "0::/job" of 2
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            root, inside = root / controller, path
            break
        if not names:
            inside = path
    folder = root / inside.lstrip("/")
    return [path for path in (folder, *folder.parents) if path.is_relative_to(root)]


def system_file(path: str | Path) -> str | None:
    """Return the text of a file of /proc or /sys, or None if it is missing or a container refuses it."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None
