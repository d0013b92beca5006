"""Facts in, findings out: every rule finds what it is for, and nothing on machines that are fine."""

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest

from kenotron.doctor import Facts, rules
from kenotron.doctor.facts import Accelerator, Disk, Limits, Memory, Network, Nvidia, Processor, Software, Torch
from kenotron.doctor.rules import findings
from support.tiny_run import REPOSITORY

GIB = 1 << 30
HOPPER = Accelerator("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, "9.0")
PACKAGES = {"torch": "2.13.0+cu130", "triton": "3.7.1"}

SERVER = Facts(
    software=Software(system="Linux", packages=PACKAGES, triton_wanted="3.7.1", compiler="g++", python_headers=True),
    torch=Torch(
        version="2.13.0+cu130",
        cuda="13.0",
        architectures=["sm_80", "sm_90", "sm_100", "compute_120"],
        onednn=True,
        threads=64,
        backends=["gloo", "nccl"],
        accelerators=[HOPPER, HOPPER],
    ),
    processor=Processor("Xeon", cores=64, allowed=64, load=0.5, instructions=["avx512f"]),
    memory=Memory(total=512 * GIB, available=500 * GIB, shm_total=256 * GIB),
    nvidia=Nvidia(driver="580.65", cuda="13.0", gpus=[HOPPER.name, HOPPER.name]),
    network=Network(["eth0"], ["mlx5_0:1"]),
    disk=Disk("ext4", 1000 * GIB, 500 * GIB, 10_000_000, 0.0),
    limits=Limits(open_files=65536, locked_memory=None),
)
LAPTOP = Facts(
    software=replace(SERVER.software, packages={"torch": "2.13.0+cpu"}, triton_wanted=None),
    torch=Torch(version="2.13.0+cpu", onednn=True, threads=8, backends=["gloo"]),
    processor=Processor("Ryzen", cores=8, allowed=8, load=0.5),
    memory=Memory(total=16 * GIB, available=9 * GIB, shm_total=8 * GIB),
    network=Network(["wlan0"], []),
    disk=SERVER.disk,
    limits=SERVER.limits,
)


def server(section: str, **fields: Any) -> Facts:
    return replace(SERVER, **{section: replace(getattr(SERVER, section), **fields)})


def laptop(section: str, **fields: Any) -> Facts:
    return replace(LAPTOP, **{section: replace(getattr(LAPTOP, section), **fields)})


def with_settings(facts: Facts, **settings: str) -> Facts:
    return replace(facts, settings={**facts.settings, **settings})


def gpu(**fields: Any) -> Facts:
    """The server, its second GPU changed as torch sees it."""
    return server("torch", accelerators=[HOPPER, replace(HOPPER, **fields)])


NO_GPUS = replace(SERVER.torch, accelerators=[], accelerators_problem="CUDA unknown error")
OLD_DRIVER = server("nvidia", cuda="12.4", driver="550.54")  # runs CUDA 13 with a package for compatibility

# Each machine has one thing wrong: the rule's name, the machine, what the line must contain.
WRONG = [
    ("torch-does-not-import", Facts(torch=Torch(problem="OSError: libcudart.so.13")), "libcudart.so.13"),
    ("requirement-not-met", server("software", unmet=["transformers>=4.56 (found 4.40)"]), "transformers>=4.56"),
    ("triton-mismatch", server("software", packages={"triton": "3.9.0"}), "built for 3.7.1"),
    ("triton-missing", server("software", packages={}), "model.compile"),
    ("no-compiler", laptop("software", compiler=None), "C++ compiler"),
    ("no-compiler", laptop("software", python_headers=False), "Python.h"),
    ("no-compiler", server("software", compiler=None), "Triton"),
    ("no-compiler", server("software", python_headers=False), "flex_attention"),
    ("triton-interpreted", with_settings(SERVER, TRITON_INTERPRET="1"), "bfloat16"),
    ("float32-rounded", with_settings(SERVER, NVIDIA_TF32_OVERRIDE="1"), "NVIDIA_TF32_OVERRIDE"),
    ("no-such-device", with_settings(LAPTOP, KENOTRON_DEVICE="cuda"), "KENOTRON_DEVICE is cuda"),
    ("torch-built-for-cpu", replace(LAPTOP, nvidia=SERVER.nvidia), "2 GPUs"),
    ("driver-too-old", replace(OLD_DRIVER, torch=NO_GPUS), "CUDA 12.4"),
    ("gpus-not-seen", replace(SERVER, torch=NO_GPUS), "unknown error"),
    ("gpus-hidden", with_settings(server("torch", accelerators=[HOPPER]), CUDA_VISIBLE_DEVICES="1"), "1 of 2"),
    ("nvidia-smi-fails", server("nvidia", problem="nvidia-smi gave no answer", gpus=[]), "no answer"),
    ("gpu-not-in-this-torch", server("torch", architectures=["sm_70", "sm_80"]), "9.0"),
    ("no-bfloat16", server("torch", accelerators=[replace(HOPPER, capability="7.5")], architectures=[]), "H100"),
    ("gpu-memory-taken", gpu(memory_free=40 * GIB), "40.0 of 80.0 GiB of GPU 1"),
    ("mig-on", server("nvidia", mig=True), "MIG"),
    ("cores-unused", with_settings(laptop("torch", threads=1), OMP_NUM_THREADS="1"), "1 of 8 cores because of OMP_NUM"),
    ("too-many-threads", laptop("processor", quota=2.0), "quota of 2 allows 2 cores"),
    ("too-many-threads", laptop("processor", allowed=4), "affinity allows 4 cores"),
    ("little-memory", laptop("memory", available=GIB, limit=4 * GIB), "1.0 GiB of memory are free of the cgroup's 4.0"),
    ("small-shm", server("memory", shm_total=64 << 20), "64 MiB"),
    ("folder-not-writable", replace(LAPTOP, disk=Disk(problem="PermissionError: denied")), "PermissionError"),
    ("disk-full", server("disk", free=10 << 20), "10 MiB"),
    ("disk-full", server("disk", files_free=3), "no more files"),
    ("disk-almost-full", server("disk", free=3 * GIB), "268M parameters"),
    ("folder-in-memory", server("disk", filesystem="tmpfs"), "tmpfs"),
    ("folder-in-container", server("disk", filesystem="overlay"), "container"),
    ("clock-skew", server("disk", clock_skew=-30.0), "30 s behind"),
    ("few-open-files", server("limits", open_files=1024), "1024"),
    ("locked-memory-limited", server("limits", locked_memory=64 << 10), "64 KiB"),
    ("no-such-interface", with_settings(SERVER, NCCL_SOCKET_IFNAME="ib"), "only eth0"),
    ("no-such-interface", with_settings(SERVER, GLOO_SOCKET_IFNAME="eth"), "only eth0"),
]


@pytest.mark.parametrize("facts", [SERVER, LAPTOP, OLD_DRIVER, Facts()], ids=["server", "laptop", "old", "unknown"])
def test_nothing_is_found_on_a_machine_that_is_fine(facts: Facts) -> None:
    assert findings(facts) == []


@pytest.mark.parametrize(("name", "facts", "says"), WRONG, ids=[f"{n}-{name}" for n, (name, _, _) in enumerate(WRONG)])
def test_what_is_wrong_is_found_by_name_and_nothing_else(name: str, facts: Facts, says: str) -> None:
    found = findings(facts)
    assert [finding.name for finding in found] == [name]
    assert says in found[0].what
    assert found[0].do


def test_every_finding_has_a_machine_that_it_is_for_and_a_place_in_the_docs() -> None:
    names = set(re.findall(r'Finding\("([a-z0-9-]+)"', inspect.getsource(rules)))
    assert names == {name for name, _, _ in WRONG}
    section = (REPOSITORY / "docs" / "doctor.md").read_text().split("## Findings")[1].split("\nA rule")[0]
    assert names == set(re.findall(r"`([a-z0-9-]+)`", section))


@pytest.mark.parametrize(("library", "value"), [("NCCL", "eth"), ("NCCL", "^docker,lo"), ("GLOO", "lo")])
def test_interfaces_that_are_there_are_not_blamed(library: str, value: str) -> None:
    """NCCL takes a prefix, too, and what to leave out."""
    assert findings(with_settings(SERVER, **{f"{library}_SOCKET_IFNAME": value})) == []


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80"], "8.6", True),  # machine code runs on later minor versions
        (["sm_86"], "8.0", False),
        (["sm_80"], "9.0", False),
        (["compute_80"], "12.0", True),  # PTX is compiled for what comes
        (["sm_90a"], "9.0", True),
        (["sm_120"], "12.0", True),
    ],
)
def test_gpus_need_code_of_their_major_version_or_ptx(architectures: list[str], capability: str, runs: bool) -> None:
    facts = server("torch", architectures=architectures, accelerators=[replace(HOPPER, capability=capability)] * 2)
    assert ([finding.name for finding in findings(facts)] == []) == runs


def test_the_gravest_finding_comes_first() -> None:
    facts = with_settings(server("disk", free=10 << 20), NVIDIA_TF32_OVERRIDE="1")
    facts = with_settings(replace(facts, torch=replace(facts.torch, accelerators=[HOPPER])), CUDA_VISIBLE_DEVICES="1")
    assert [finding.severity for finding in findings(facts)] == ["error", "warning", "hint"]
