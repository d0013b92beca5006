"""The facts about a machine and the report of `kenotron doctor`, as plain data.

    Facts(memory=Memory(shm_total=64 << 20))     a container with docker's default /dev/shm
      └─ rules.findings(facts)                   [Finding("small-shm", "warning", …)]

Rules and page use only these data, so a rule about eight GPUs can be tested without one. Sizes are in bytes, times in
seconds; None means unknown. `asdict(report)` is the object that `--json` prints.
"""

from dataclasses import dataclass, field

from kenotron.launch.environment import within_quota

VERSION = 2  # of the JSON object; raised when a key changes its meaning or is removed


@dataclass(frozen=True)
class Software:
    """Versions, and the tools that torch.compile needs to build kernels."""

    kenotron: str = ""
    python: str = ""
    system: str = ""  # Linux 6.1.0 x86_64
    libc: str = ""
    packages: dict[str, str] = field(default_factory=dict)  # name → version
    unmet: list[str] = field(default_factory=list)  # requirements of kenotron: "transformers>=4.56 (found 4.40)"
    triton_wanted: str | None = None  # the version that torch's metadata requires
    compiler: str | None = None  # C++
    python_headers: bool = False


@dataclass(frozen=True)
class Accelerator:
    """A device as torch sees it."""

    name: str = ""
    memory_total: int = 0
    memory_free: int = 0
    capability: str = ""  # 9.0; gfx942 on ROCm


@dataclass(frozen=True)
class Torch:
    """The build and the devices of torch, from a separate process."""

    problem: str | None = None  # why it cannot be imported; then all other fields are unknown
    version: str = ""
    cuda: str | None = None  # version of the runtime that it was built with
    rocm: str | None = None
    architectures: list[str] = field(default_factory=list)  # sm_90, compute_90
    cpu_capability: str = ""
    blas: str = ""
    onednn: bool = False
    threads: int = 0
    backends: list[str] = field(default_factory=list)  # gloo, nccl
    nccl: str | None = None
    accelerators: list[Accelerator] = field(default_factory=list)
    accelerators_problem: str | None = None  # why a build for CUDA or ROCm finds none


@dataclass(frozen=True)
class Nvidia:
    """NVIDIA's driver and its GPUs, even if torch cannot use them; empty without nvidia-smi."""

    problem: str | None = None
    driver: str | None = None
    cuda: str | None = None  # the newest runtime that the driver supports
    gpus: list[str] = field(default_factory=list)  # names
    mig: bool = False  # whether MIG is on for one of them


@dataclass(frozen=True)
class Processor:
    """The cores of the machine, and how many of them this process may use."""

    name: str = ""
    cores: int = 0
    allowed: int = 0  # by affinity: taskset, cpusets, Slurm
    quota: float | None = None  # the cgroup's limit on processor time, in cores
    instructions: list[str] = field(default_factory=list)
    load: float | None = None  # load average over the last minute

    @property
    def usable(self) -> int:
        """The number of cores that threads of this process can use at the same time."""
        return within_quota(self.allowed, self.quota)


@dataclass(frozen=True)
class Memory:
    """Main memory and its limits."""

    total: int = 0
    available: int | None = None  # without swapping, within the cgroup's limit
    limit: int | None = None  # of the cgroup
    shm_total: int | None = None


@dataclass(frozen=True)
class Disk:
    """The file system of the folder of a run."""

    filesystem: str | None = None
    total: int = 0
    free: int = 0
    files_free: int | None = None
    clock_skew: float | None = None  # of the file system's clock against this machine's
    problem: str | None = None  # why no file can be written there; then all other fields are unknown


@dataclass(frozen=True)
class Network:
    """The network interfaces, without names and addresses of machines."""

    interfaces: list[str] = field(default_factory=list)  # that are up
    infiniband: list[str] = field(default_factory=list)  # active ports, of InfiniBand or RoCE


@dataclass(frozen=True)
class Limits:
    """The limits of ulimit; None: unlimited."""

    open_files: int | None = None
    locked_memory: int | None = None


@dataclass(frozen=True)
class Facts:
    """All facts about the machine. By default all are unknown, and no rule has a finding."""

    software: Software = Software()
    torch: Torch = Torch()
    processor: Processor = Processor()
    memory: Memory = Memory()
    nvidia: Nvidia = Nvidia()
    network: Network = Network()
    disk: Disk = Disk()
    limits: Limits = Limits()
    settings: dict[str, str] = field(default_factory=dict)  # environment variables, see settings.py


@dataclass(frozen=True)
class Finding:
    """A problem of the machine. error: training fails or is wrong; warning: it may; hint: good to know."""

    name: str
    severity: str
    what: str
    do: str


@dataclass(frozen=True)
class SelfTest:
    """A training run and its resumption on one device or group of ranks."""

    where: str  # cpu, cuda:0, 2 ranks (gloo)
    passed: bool
    seconds: float
    text: str  # the numbers that agree, or the problem


@dataclass(frozen=True)
class Report:
    """The result of one call of `kenotron doctor`."""

    version: int
    time: str  # UTC
    seconds: float
    passed: bool
    facts: Facts
    findings: list[Finding]
    self_tests: list[SelfTest]
