"""What a machine, a container or a Slurm job has, as the files of Linux say it; what is said when it is used up."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.launch import environment, machine_memory, memory
from support.tiny_run import tiny_config

GIB = 1 << 30
MACHINE = {"/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1024 kB\nMemAvailable: {48 << 20} kB"}
V2 = {
    "/proc/self/cgroup": "0::/slurm/job_7",
    "/sys/fs/cgroup/slurm/job_7/memory.max": "max",
    "/sys/fs/cgroup/slurm/memory.max": str(16 * GIB),
    "/sys/fs/cgroup/slurm/memory.current": str(10 * GIB),
    "/sys/fs/cgroup/slurm/memory.stat": f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}",
}
BROTHERS = {
    "/sys/fs/cgroup/memory.max": str(32 * GIB),
    "/sys/fs/cgroup/memory.current": str(30 * GIB),
    "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB // 2}\nactive_file {GIB}\nslab_reclaimable {GIB // 2}",
}
V1 = {
    "/proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/job",
    "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(8 * GIB),
    "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(9 * GIB),
    "/sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}
ADVICE = (
    "out of memory? The kernel has killed processes for lack of it since the run began; "
    "try tokens.micro_batch_size=2 tokens.batch_accumulation_per_replica=2; `kenotron plan` predicts what fits"
)


@pytest.mark.parametrize(
    ("files", "available"),
    [
        (MACHINE, 48 * GIB),
        (MACHINE | V2, 9 * GIB),
        (MACHINE | V1, 1 * GIB),
        (MACHINE | V1 | {"/sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(20 * GIB)}, 0),
        (MACHINE | V2 | BROTHERS, 4 * GIB),
        (V2, None),
    ],
    ids=["machine", "job of cgroup v2", "job of cgroup v1", "used up", "the group around it is fuller", "not Linux"],
)
def test_what_is_available_is_within_the_limits_of_containers_and_jobs(
    monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str], available: int | None
) -> None:
    monkeypatch.setattr(machine_memory, "system_file", lambda path: files.get(str(path)))
    assert machine_memory.available_memory() == available


def test_kills_for_lack_of_memory_are_those_that_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/vmstat": "pgmajfault 5\noom_kill 3\noom_kill_other 9"}
    monkeypatch.setattr(machine_memory, "system_file", lambda path: files.get(str(path)))
    assert machine_memory.out_of_memory_kills() == 3
    files.clear()
    assert machine_memory.out_of_memory_kills() is None


@pytest.mark.parametrize(
    ("kills", "name", "said"),
    [(7, "SIGKILL", ADVICE), (6, "SIGKILL", ""), (None, "SIGKILL", None), (7, "SIGSEGV", None), (7, "SIGBUS", None)],
)
def test_memory_is_named_as_the_cause_when_the_kernel_has_killed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int | None, name: str, said: str | None
) -> None:
    monkeypatch.setattr(memory, "out_of_memory_kills", lambda: kills)
    config, number = tiny_config(tmp_path, "parallelism.dp=2"), signal.Signals[name]
    assert memory.why_killed(config, 6, number) == said
    monkeypatch.setattr(memory, "accelerators", lambda: 2)  # where weights are not in host memory
    on_gpus = "out of host memory? The kernel has killed processes for lack of it since the run began"
    assert memory.why_killed(config, 6, number) == (on_gpus if said == ADVICE else said)


def test_a_warning_precedes_a_run_that_will_not_fit(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    config = tiny_config(tmp_path)
    for free, warnings in ((GIB, 0), (95_000, 1), (None, 0)):
        monkeypatch.setattr(memory, "free_memory", lambda *_, free=free: free)
        with memory.machine_limits(config, torch.device("cpu"), warn=True):
            pass
        assert capsys.readouterr().err.count("warning: rank 0 will need ") == warnings


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 8),
        ({"/proc/self/cgroup": "0::/pod/x", "/sys/fs/cgroup/pod/cpu.max": "250000 100000"}, 3),
        ({"/proc/self/cgroup": "0::/pod/x", "/sys/fs/cgroup/pod/cpu.max": "max 100000"}, 8),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "1600000 100000"}, 8),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
    ],
    ids=["no limit", "docker run --cpus=2.5", "unlimited", "more than there are", "a tenth"],
)
def test_threads_are_within_a_containers_limit(monkeypatch: Any, files: Mapping[str, str], usable: int) -> None:
    monkeypatch.setattr(machine_memory, "system_file", lambda path: files.get(str(path)))
    monkeypatch.setattr(environment, "cores_by_affinity", lambda: 8)
    assert environment.cores() == usable
