"""Memory and processor time that processes here may use, within the limits of containers and Slurm jobs (cgroups)."""

import re
from pathlib import Path

UNLIMITED = 1 << 60  # cgroup v1 writes a number beyond any memory where there is no limit


def available_memory() -> int | None:
    """Bytes that processes here may still allocate without swapping; None where the system does not say it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", system_file("/proc/meminfo") or "", re.MULTILINE)
    limit, used = memory_of_cgroup()
    if found is None:
        return None
    available = int(found.group(1)) * 1024
    return available if limit is None else min(available, max(limit - used, 0))


def out_of_memory_kills() -> int | None:
    """How many processes the kernel has killed since it booted because a machine, container or job was out of memory.

    None where it does not count them.
    """
    found = re.search(r"^oom_kill (\d+)", system_file("/proc/vmstat") or "", re.MULTILINE)
    return int(found.group(1)) if found else None


def memory_of_cgroup() -> tuple[int | None, int]:
    """Limit and use, beside what the kernel frees on demand, of the group on the way up that has the least left."""
    found: list[tuple[int, int]] = []
    for folder in cgroup_folders("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            text = system_file(folder / limit) or ""
            if text.isdigit() and int(text) < UNLIMITED:
                stat = system_file(folder / "memory.stat") or ""
                sizes = dict(re.findall(r"^(?:total_)?(\w+) (\d+)$", stat, re.MULTILINE))  # version 1: own, then total
                freed = sum(int(sizes.get(name, 0)) for name in ("inactive_file", "active_file", "slab_reclaimable"))
                found.append((int(text), max(int(system_file(folder / used) or 0) - freed, 0)))
    return min(found, key=lambda group: group[0] - group[1], default=(None, 0))


def processor_quota() -> float | None:
    """Cores' worth of processor time, by the first cgroup on the way up that limits it."""
    for folder in cgroup_folders("cpu"):
        both = (system_file(folder / "cpu.max") or "").split()  # version 2: "200000 100000" or "max 100000"
        if len(both) != 2:
            both = [system_file(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if both[0].isdigit() and both[1].isdigit() and int(both[1]):
            return int(both[0]) / int(both[1])
    return None


def cgroup_folders(controller: str) -> list[Path]:
    """The folders of this process's cgroup and of its parents: version 1's if it has `controller`, else version 2's."""
    root, inside = Path("/sys/fs/cgroup"), "/"
    for line in (system_file("/proc/self/cgroup") or "").splitlines():  # "4:memory:/job" of version 1, "0::/job" of 2
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            root, inside = root / controller, path
            break
        if not names:
            inside = path
    folder = root / inside.lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(root)]


def system_file(path: str | Path) -> str | None:
    """The text of a file of /proc or /sys; None if there is none, or a container refuses it."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None
