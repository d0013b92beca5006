"""Where facts come from: nvidia-smi's answers, settings without anything private, /proc, processes with a limit."""

import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from kenotron.doctor import environment
from kenotron.doctor.limited import Failed, call_limited
from kenotron.doctor.settings import anonymous, settings

HEAD = """\
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
"""
GPUS = """\
NVIDIA H100 80GB HBM3, Disabled
NVIDIA GeForce RTX 4090, [N/A]
"""


def test_what_nvidia_smi_prints_is_read() -> None:
    assert environment.parse_versions(HEAD) == ("550.54.15", "12.4")
    assert environment.parse_gpus(GPUS) == (["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"], False)
    assert environment.parse_gpus("NVIDIA H200, Enabled\n") == (["NVIDIA H200"], True)


def test_settings_show_nothing_private() -> None:
    shown = {
        "NCCL_DEBUG": ("WARN", "WARN"),
        "KENOTRON_CACHE": ("/home/ada/cache", "(a path)"),
        "TORCH_HOME": ("~/torch", "(a path)"),
        "CUDA_PATH": ("C:\\Users\\ada", "(a path)"),
        "NCCL_COMM_ID": ("ada-laptop:4000", "(an address)"),
        "GLOO_SOCKET_IFNAME": ("eth0", "eth0"),
        "UCX_NET": ("10.0.0.7", "(an address)"),
        "LD_PRELOAD": ("/home/ada/lib/libjemalloc.so.2", "libjemalloc.so.2"),
        "NCCL_LONG": ("x" * 500, "x" * 120 + "…"),
    }
    private = {"HF_TOKEN": "hf_secret", "KENOTRON_API_KEY": "secret", "AWS_SECRET_ACCESS_KEY": "secret"}
    private |= {"USER": "ada", "HOSTNAME": "ada-laptop"}
    found = settings(private | {name: value for name, (value, _) in shown.items()})
    assert found == {name: text for name, (_, text) in shown.items()}


def test_messages_of_errors_name_no_folder_machine_or_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "ada-laptop")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    for message, expected in (
        ("OSError: /home/ada/env/lib/libtorch.so: undefined symbol", "OSError: …/libtorch.so: undefined symbol"),
        ("[Errno 13] Permission denied: '/scratch/ada/my run/x'", "[Errno 13] Permission denied: '…/x'"),
        ("cannot connect to ada-laptop as ada, Canada", "cannot connect to (this machine) as (user), Canada"),
        ("step 6: lm_loss 5.6 in the uninterrupted run", "step 6: lm_loss 5.6 in the uninterrupted run"),
    ):
        assert anonymous(message) == expected


def test_facts_of_this_machine_agree_with_other_sources() -> None:
    memory, processor = environment.memory(), environment.processor()
    kilobytes = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert kilobytes is not None
    assert memory.total == pytest.approx(int(kilobytes[1]) * 1024, rel=0.01)
    assert memory.available is not None
    assert 0 < memory.available <= memory.total
    assert 1 <= processor.usable <= processor.allowed <= processor.cores == os.cpu_count()


def test_a_folder_is_described_by_writing_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    disk = environment.disk(tmp_path)
    assert (disk.problem, disk.total) == (None, shutil.disk_usage(tmp_path).total)
    assert disk.clock_skew == pytest.approx(0.0, abs=1.0)
    assert list(tmp_path.iterdir()) == []
    assert re.match(r"\w+Error: ", environment.disk(Path("/sys")).problem or "")  # where root cannot write either


def slept(seconds: float) -> None:
    time.sleep(seconds)


def dies(number: int) -> None:
    os.kill(os.getpid(), number)


def raises() -> None:
    raise ImportError("libcudart.so.13: cannot open shared object file")


def values_of(variables: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in variables}


def test_what_hangs_crashes_or_raises_elsewhere_is_one_line_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenotron.doctor.limited.busy_factor", lambda: 1.0)
    started = time.monotonic()
    with pytest.raises(Failed, match=r"^no answer within 1 s$"):
        call_limited(slept, 600, seconds=1)
    assert time.monotonic() - started < 60
    monkeypatch.setattr("kenotron.doctor.limited.busy_factor", lambda: 10.0)
    with pytest.raises(Failed, match=r"^was killed by SIGILL$"):
        call_limited(dies, signal.SIGILL, seconds=60)
    with pytest.raises(Failed, match=r"^ImportError: libcudart\.so\.13"):
        call_limited(raises, seconds=60)


def test_a_job_s_ranks_are_not_those_of_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "3")
    names, threads = ["RANK", "SLURM_PROCID", "OMP_NUM_THREADS"], {"OMP_NUM_THREADS": "2"}
    found = call_limited(values_of, names, seconds=60, environment=threads)
    assert found == {"RANK": None, "SLURM_PROCID": None, "OMP_NUM_THREADS": "2"}


def test_the_limit_of_open_files_is_what_ranks_raise_it_to() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        expected = None if before[1] == resource.RLIM_INFINITY else before[1]
        assert environment.limits().open_files == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
