"""Rules about memory, disks and limits of the process."""

from __future__ import annotations

from kenotron.doctor.facts import Facts, Finding
from kenotron.doctor.rules.finding import error, hint, warning
from kenotron.doctor.rules.software import machine_busy

GIB, MIB = 1 << 30, 1 << 20
SMALL_SHM = GIB  # docker's default is 64 MiB
LITTLE_MEMORY = 2 * GIB
FULL_DISK, ALMOST_FULL_DISK = 256 * MIB, 5 * GIB
FEW_FILES = 4096
SLOW_DISK = 100e6  # bytes/s
SLOW_FSYNC_S = 0.5
SKEW_S = 2.0
BYTES_PER_PARAMETER = 12  # of a checkpoint: float32 weights and Adam's two moments


def little_memory(facts: Facts) -> Finding | None:
    memory = facts.memory
    if memory.available is None or memory.available >= LITTLE_MEMORY:
        return None
    whose = f" of the cgroup's {memory.limit / GIB:.1f} GiB" if memory.limit else ""
    return warning(
        f"{memory.available / GIB:.1f} GiB of memory are free{whose}: a rank that needs more is killed (SIGKILL)",
        "end other processes or raise the limit; each local rank of a tiny model takes about 0.5 GiB",
    )


def swap_in_use(facts: Facts) -> Finding | None:
    used = facts.memory.swap_used
    if used < GIB:
        return None
    return warning(f"{used / GIB:.1f} GiB are swapped out: steps may wait for the disk", "end what fills the memory")


def small_shm(facts: Facts) -> Finding | None:
    total = facts.memory.shm_total
    if total is None or total >= SMALL_SHM:
        return None
    return warning(
        f"/dev/shm has {total / MIB:.0f} MiB: NCCL between GPUs of one machine fails with a bus error when it is full",
        "docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm",
    )


def folder_does_not_answer(facts: Facts) -> Finding | None:
    problem = facts.disk.problem
    if problem is None:
        return None
    return error(f"the file system of the folder does not answer: {problem}", "is its file server up?")


def folder_not_writable(facts: Facts) -> Finding | None:
    failed = [speed for speed in facts.speeds if speed.what == "write" and speed.problem]
    if not failed:
        return None
    what = f"no file can be written in the folder: {failed[0].problem}"
    if "no answer" in str(failed[0].problem):
        what = f"4 MiB written to the folder and read again: {failed[0].problem}"
    return error(what, "kenotron doctor --folder OTHER")


def disk_full(facts: Facts) -> Finding | None:
    disk = facts.disk
    no_files = disk.files_free is not None and disk.files_free < 100
    if not disk.total or (disk.free >= FULL_DISK and not no_files):
        return None
    left = "no more files" if no_files else f"{disk.free / MIB:.0f} MiB"
    return error(f"the folder's disk has room for {left}: a checkpoint cannot be saved", "free space")


def disk_almost_full(facts: Facts) -> Finding | None:
    disk = facts.disk
    if not disk.total or not FULL_DISK <= disk.free < ALMOST_FULL_DISK:
        return None
    return warning(
        f"the folder's disk has {disk.free / GIB:.1f} GiB left: checkpoints of a model of "
        f"{disk.free / BYTES_PER_PARAMETER / 1e6:.0f}M parameters fill it",
        "free space, or checkpoints.keep_last: 2",
    )


def folder_in_memory(facts: Facts) -> Finding | None:
    if facts.disk.filesystem not in ("tmpfs", "ramfs"):
        return None
    return warning(
        f"the folder is on {facts.disk.filesystem}: checkpoints take main memory and are gone after a reboot",
        "train in a folder on a disk",
    )


def folder_in_container(facts: Facts) -> Finding | None:
    if facts.disk.filesystem not in ("overlay", "aufs"):
        return None
    return warning("the folder belongs to the container: checkpoints are gone with it", "mount a volume, train there")


def slow_disk(facts: Facts) -> Finding | None:
    speed = facts.speed("write", "folder")
    if not speed or speed >= SLOW_DISK or machine_busy(facts):
        return None
    return hint(
        f"the folder's disk writes {speed / 1e6:.0f} MB/s: saving 1B parameters with AdamW takes "
        f"{BYTES_PER_PARAMETER * 1e9 / speed / 60:.0f} minutes",
        "another disk, or checkpoints.checkpointing_engine: async, with which training continues during a save",
    )


def slow_fsync(facts: Facts) -> Finding | None:
    seconds = facts.speed("fsync", "folder")
    if not seconds or seconds < SLOW_FSYNC_S or machine_busy(facts):
        return None
    return hint(f"an fsync takes {seconds:.1f} s in the folder, and a checkpoint has several", "another disk")


def clock_skew(facts: Facts) -> Finding | None:
    skew = facts.disk.clock_skew
    if skew is None or abs(skew) < SKEW_S:
        return None
    return warning(
        f"the file server's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's",
        "synchronize both (chrony, ntpd): times in logs and ages of files are wrong",
    )


def few_open_files(facts: Facts) -> Finding | None:
    limit = facts.limits.open_files
    if limit is None or limit >= FEW_FILES:
        return None
    return warning(
        f"a process may open {limit} files: runs on many token files or ranks end with 'Too many open files'",
        "ulimit -n 65536",
    )


RULES = (
    little_memory,
    swap_in_use,
    small_shm,
    folder_does_not_answer,
    folder_not_writable,
    disk_full,
    disk_almost_full,
    folder_in_memory,
    folder_in_container,
    slow_disk,
    slow_fsync,
    clock_skew,
    few_open_files,
)
