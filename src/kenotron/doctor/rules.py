"""Find known causes of failed runs and wrong numbers, from facts alone.

    findings(Facts(memory=Memory(shm_total=64 << 20)))      [Finding("small-shm", "warning", "/dev/shm has …", …)]

Each function of `PARTS` yields the findings about one part of a machine, and none about unknown facts. A new finding
needs facts that show it, in tests/doctor/test_rules.py, and its name in docs/doctor.md. Tuning hints do not belong
here.
"""

import re
from collections.abc import Iterator

from kenotron.config.errors import counted
from kenotron.doctor.facts import Facts, Finding

SEVERITIES = ("error", "warning", "hint")

GIB, MIB = 1 << 30, 1 << 20
CUDA_CONTEXT = GIB  # more GPU memory than the context of this command takes
LITTLE_MEMORY = 2 * GIB
SMALL_SHM = GIB  # docker's default is 64 MiB
FULL_DISK, ALMOST_FULL_DISK = 256 * MIB, 5 * GIB
BYTES_PER_PARAMETER = 12  # of a checkpoint: float32 weights and Adam's two moments
FEW_FILES = 4096
LOCKED_MEMORY = GIB
SKEW_S = 2.0

ROUNDING = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")


def findings(facts: Facts) -> list[Finding]:
    """Return the problems of a machine, the most severe first."""
    found = [finding for part in PARTS for finding in part(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) for 2.13.0+cu130."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def _versions(facts: Facts) -> Iterator[Finding]:
    software, torch = facts.software, facts.torch
    if torch.problem is not None:
        do = "install torch again: https://pytorch.org/get-started/locally"
        yield Finding("torch-does-not-import", "error", f"importing torch fails: {torch.problem}", do)
    if software.unmet:
        packages = " ".join(repr(requirement.split()[0]) for requirement in software.unmet)
        what = f"kenotron needs {', '.join(software.unmet)}"
        yield Finding("requirement-not-met", "error", what, f"pip install {packages}")


def _compilers(facts: Facts) -> Iterator[Finding]:
    software, torch = facts.software, facts.torch
    required, triton = software.triton_wanted, software.packages.get("triton")
    if required is not None and triton is not None and required != triton:
        what = f"triton {triton} is installed, torch {torch.version} was built for {required}: "
        what += "compiling fails in odd ways"
        yield Finding("triton-mismatch", "warning", what, f"pip install triton=={required}")
    if torch.accelerators and triton is None:
        what = "triton is missing: model.compile: true fails on the GPU"
        yield Finding("triton-missing", "warning", what, "pip install triton")
    if software.system and not (software.compiler and software.python_headers):
        missing = "a C++ compiler" if software.compiler is None else "Python.h"
        do = "install g++ or clang, and Python's headers (python3-dev)"
        if torch.accelerators:
            what = (
                f"{missing} is missing, and Triton compiles with both: model.compile: true, _attn_implementation: "
                "flex_attention and model.kernels: triton fail on the GPU"
            )
            yield Finding("no-compiler", "warning", what, do)
        else:
            what = f"{missing} is missing: model.compile: true cannot build kernels for the CPU"
            yield Finding("no-compiler", "hint", what, f"{do}, or leave model.compile off")


def _changed_numbers(facts: Facts) -> Iterator[Finding]:
    if (device := facts.settings.get("KENOTRON_DEVICE", "")) not in ("", "cpu"):
        what = f"KENOTRON_DEVICE is {device}: no run starts; expected cpu, or unset to use an accelerator where one is"
        yield Finding("no-such-device", "error", what, "unset it")
    if facts.settings.get("TRITON_INTERPRET", "0") not in ("", "0"):
        what = "TRITON_INTERPRET is set: kernels are interpreted in Python, and bfloat16 dot products come out wrong"
        yield Finding("triton-interpreted", "warning", what, "unset it")
    rounding = next((name for name in ROUNDING if facts.settings.get(name) == "1"), None)
    if rounding is not None:
        what = f"{rounding}=1 rounds float32 products to tf32: layouts of a float32 run agree to 1e-3 only"
        do = "unset it, and train with model.dtype: bfloat16 for speed"
        yield Finding("float32-rounded", "warning", what, do)


def _drivers(facts: Facts) -> Iterator[Finding]:
    torch, nvidia = facts.torch, facts.nvidia
    gpus = counted(len(nvidia.gpus), "GPU")
    if nvidia.problem is not None:
        do = "look at dmesg for Xid errors; a GPU that fell off the bus needs a reboot"
        yield Finding("nvidia-smi-fails", "warning", nvidia.problem, do)
    if nvidia.mig:
        what = "MIG splits a GPU: ranks on its instances cannot use NCCL between each other"
        yield Finding("mig-on", "warning", what, "nvidia-smi -mig 0")
    if nvidia.gpus and torch.version and torch.cuda is None and torch.rocm is None:
        what = f"the machine has {gpus}, but torch {torch.version} is built for the CPU only"
        do = "install torch for CUDA: https://pytorch.org/get-started/locally"
        yield Finding("torch-built-for-cpu", "warning", what, do)
    if torch.cuda is None:
        return
    visible = facts.settings.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(torch.accelerators) < len(nvidia.gpus):
        what = f"CUDA_VISIBLE_DEVICES={visible} shows {len(torch.accelerators)} of {gpus}"
        yield Finding("gpus-hidden", "hint", what, "unset it to use all")
    if torch.accelerators:
        return  # NVIDIA's compatibility package allows an older driver
    if nvidia.cuda is not None and numbers(nvidia.cuda)[:1] < numbers(torch.cuda)[:1]:
        what = f"torch is built for CUDA {torch.cuda}, the driver {nvidia.driver} runs CUDA {nvidia.cuda} at most"
        do = f"a newer driver, or torch for CUDA {numbers(nvidia.cuda)[0]}"
        yield Finding("driver-too-old", "error", what, do)
    elif nvidia.gpus and visible is None and facts.settings.get("KENOTRON_DEVICE") != "cpu":
        what = f"torch finds none of {gpus}: {torch.accelerators_problem or 'no reason given'}"
        do = "look at dmesg for Xid errors; in a container: docker run --gpus all"
        yield Finding("gpus-not-seen", "error", what, do)


def _gpus(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    for number, gpu in enumerate(torch.accelerators):
        total, taken = gpu.memory_total, gpu.memory_total - gpu.memory_free
        if taken > max(total // 10, CUDA_CONTEXT):
            what = f"{taken / GIB:.1f} of {total / GIB:.1f} GiB of GPU {number} are taken by other processes"
            do = "nvidia-smi lists them; a crashed run may still be alive"
            yield Finding("gpu-memory-taken", "warning", what, do)
            break
    for gpu in torch.accelerators if torch.cuda else []:
        if torch.architectures and not _runs_on(torch.architectures, gpu.capability):
            what = f"torch {torch.version} has no kernels for {gpu.name} (compute capability {gpu.capability}), only "
            what += " ".join(torch.architectures)
            yield Finding("gpu-not-in-this-torch", "error", what, "install a torch for another version of CUDA")
            break
    old = [gpu.name for gpu in torch.accelerators if torch.cuda and numbers(gpu.capability)[0] < 8]
    if old:
        what = f"{old[0]} has no bfloat16 units: they are emulated, slowly"
        yield Finding("no-bfloat16", "warning", what, "model.dtype: float16 or float32 there")


def _runs_on(architectures: list[str], capability: str) -> bool:
    """Return whether a GPU can run code for `architectures`.

    sm_ code runs on its major version with the same or a newer minor version, compute_ code also on newer ones.
    """
    gpu = numbers(capability)[:2]
    for kind, major, minor in re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(architectures)):
        built = (int(major), int(minor))
        if built <= gpu and (kind == "compute" or built[0] == gpu[0]):
            return True
    return False


def _threads(facts: Facts) -> Iterator[Finding]:
    threads, processor, settings = facts.torch.threads, facts.processor, facts.settings
    usable = processor.usable
    if 0 < threads < usable and not facts.torch.accelerators:
        limit = next((name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in settings), None)
        cause = f" because of {limit}={settings[limit]}" if limit else ""
        do = "unset it: kenotron gives each local rank its share" if limit else f"OMP_NUM_THREADS={usable}"
        yield Finding("cores-unused", "hint", f"torch computes with {threads} of {usable} cores{cause}", do)
    if 0 < usable < threads:
        quota = processor.quota is not None and processor.quota < processor.allowed
        bound = f"the cgroup's quota of {processor.quota:g}" if quota else "the affinity"
        what = f"torch starts {threads} threads, but {bound} allows {counted(usable, 'core')}: they take turns"
        yield Finding("too-many-threads", "warning", what, f"OMP_NUM_THREADS={usable}")


def _memory(facts: Facts) -> Iterator[Finding]:
    memory, files = facts.memory, facts.limits.open_files
    if memory.available is not None and memory.available < LITTLE_MEMORY:
        limit = f" of the cgroup's {memory.limit / GIB:.1f} GiB" if memory.limit else ""
        free = f"{memory.available / GIB:.1f} GiB of memory are free{limit}"
        what = f"{free}: a rank that needs more is killed (SIGKILL)"
        do = "end other processes or raise the limit; each local rank of a tiny model takes about 0.5 GiB"
        yield Finding("little-memory", "warning", what, do)
    shm = memory.shm_total
    if shm is not None and shm < SMALL_SHM:
        full = "NCCL between GPUs of one machine fails with a bus error when it is full"
        do = "docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
        yield Finding("small-shm", "warning", f"/dev/shm has {shm / MIB:.0f} MiB: {full}", do)
    if files is not None and files < FEW_FILES:
        what = f"a process may open {files} files: runs on many token files or ranks end with 'Too many open files'"
        yield Finding("few-open-files", "warning", what, "ulimit -n 65536")


def _folder(facts: Facts) -> Iterator[Finding]:
    disk = facts.disk
    if disk.problem is not None:
        what = f"no file can be written in the folder: {disk.problem}"
        do = "kenotron doctor --folder OTHER; where there is no answer: is its file server up?"
        yield Finding("folder-not-writable", "error", what, do)
    no_files = disk.files_free is not None and disk.files_free < 100
    if disk.total and (disk.free < FULL_DISK or no_files):
        left = "no more files" if no_files else f"{disk.free / MIB:.0f} MiB"
        what = f"the folder's disk has room for {left}: a checkpoint cannot be saved"
        yield Finding("disk-full", "error", what, "free space")
    elif disk.total and disk.free < ALMOST_FULL_DISK:
        parameters = f"{disk.free / BYTES_PER_PARAMETER / 1e6:.0f}M parameters"
        what = f"the folder's disk has {disk.free / GIB:.1f} GiB left: checkpoints of a model of {parameters} fill it"
        yield Finding("disk-almost-full", "warning", what, "free space, or checkpoints.keep_last: 2")
    if disk.filesystem in ("tmpfs", "ramfs"):
        what = f"the folder is on {disk.filesystem}: checkpoints take main memory and are gone after a reboot"
        yield Finding("folder-in-memory", "warning", what, "train in a folder on a disk")
    if disk.filesystem in ("overlay", "aufs"):
        what = "the folder belongs to the container: checkpoints are gone with it"
        yield Finding("folder-in-container", "warning", what, "mount a volume, train there")
    skew = disk.clock_skew
    if skew is not None and abs(skew) >= SKEW_S:
        what = f"the file server's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine's"
        do = "synchronize both (chrony, ntpd): times in logs and ages of files are wrong"
        yield Finding("clock-skew", "warning", what, do)


def _connections(facts: Facts) -> Iterator[Finding]:
    network, settings, locked = facts.network, facts.settings, facts.limits.locked_memory
    if network.infiniband and locked is not None and locked < LOCKED_MEMORY:
        what = f"a process may lock {locked >> 10} KiB of memory: InfiniBand cannot register NCCL's buffers"
        do = "ulimit -l unlimited; under Slurm in slurmd's LimitMEMLOCK"
        yield Finding("locked-memory-limited", "warning", what, do)
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if network.interfaces and not _selects_one(variable, settings.get(variable, ""), [*network.interfaces, "lo"]):
            what = f"{variable}={settings[variable]}: no such interface is up, only {', '.join(network.interfaces)}"
            yield Finding("no-such-interface", "error", what, "name one of these")
            break


def _selects_one(variable: str, value: str, interfaces: list[str]) -> bool:
    """Return whether the value of a variable that selects interfaces matches one of them."""
    if not value or value.startswith(("^", "(")):  # an exclusion, or a hidden value
        return True
    exact = variable.startswith("GLOO") or value.startswith("=")  # NCCL's names are prefixes
    patterns = value.removeprefix("=").split(",")
    return any(name == part or (not exact and name.startswith(part)) for part in patterns for name in interfaces)


PARTS = (_versions, _compilers, _changed_numbers, _drivers, _gpus, _threads, _memory, _folder, _connections)
