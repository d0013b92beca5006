"""What `kenotron doctor` knows of a machine, as plain data: rules and page see nothing else.

    Facts(memory=Memory(shm_total=64 << 20))     a container with docker's default /dev/shm
      └─ rules.findings(facts)                   [Finding("small-shm", "warning", …)]

so that a rule about eight GPUs is tested without one. Sizes are bytes, times seconds. None: could not be found out
here. `asdict(report)` is the object that `--json` prints.
"""

from dataclasses import dataclass, field

from kenotron.launch.environment import within_quota

VERSION = 2  # of the JSON object; raised when a key changes its meaning or goes away


@dataclass(frozen=True)
class Software:
    """Versions, and what torch.compile needs to build its kernels."""

    kenotron: str = ""
    python: str = ""
    system: str = ""  # Linux 6.1.0 x86_64
    libc: str = ""
    packages: dict[str, str] = field(default_factory=dict)  # those that matter here, by name
    unmet: list[str] = field(default_factory=list)  # requirements of kenotron: "transformers>=4.56 (found 4.40)"
    triton_wanted: str | None = None  # the version that torch's own metadata asks for
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
    """What torch says of itself, asked in a process of its own."""

    problem: str | None = None  # why it cannot be imported; then nothing else is known
    version: str = ""
    cuda: str | None = None  # the runtime that it was built with
    rocm: str | None = None
    architectures: list[str] = field(default_factory=list)  # sm_90, compute_90
    cpu_capability: str = ""
    blas: str = ""
    onednn: bool = False
    threads: int = 0
    backends: list[str] = field(default_factory=list)  # gloo, nccl
    nccl: str | None = None
    accelerators: list[Accelerator] = field(default_factory=list)
    accelerators_problem: str | None = None  # why there are none in a build for CUDA or ROCm


@dataclass(frozen=True)
class Nvidia:
    """NVIDIA's driver and its GPUs, whether torch can use them or not; empty where there is no nvidia-smi."""

    problem: str | None = None
    driver: str | None = None
    cuda: str | None = None  # the newest runtime that the driver runs
    gpus: list[str] = field(default_factory=list)  # their names
    mig: bool = False  # whether one of them is split


@dataclass(frozen=True)
class Processor:
    """Cores, and how many of them this process may use."""

    name: str = ""
    cores: int = 0
    allowed: int = 0  # by affinity: taskset, cpusets, Slurm
    quota: float | None = None  # cores' worth of time that the cgroup grants
    instructions: list[str] = field(default_factory=list)
    load: float | None = None  # processes that want to run, over the last minute

    @property
    def usable(self) -> int:
        """Cores that threads of this process run on at the same time."""
        return within_quota(self.allowed, self.quota)


@dataclass(frozen=True)
class Memory:
    """Main memory, and what takes from it."""

    total: int = 0
    available: int | None = None  # without swapping, within the cgroup's limit
    limit: int | None = None  # of the cgroup
    shm_total: int | None = None


@dataclass(frozen=True)
class Disk:
    """The file system of the folder that was asked about."""

    filesystem: str | None = None
    total: int = 0
    free: int = 0
    files_free: int | None = None
    clock_skew: float | None = None  # of the file system's clock against this machine's
    problem: str | None = None  # why no file can be written there; then nothing else is known


@dataclass(frozen=True)
class Network:
    """How other machines are reached. No names and no addresses of machines."""

    interfaces: list[str] = field(default_factory=list)  # that are up
    infiniband: list[str] = field(default_factory=list)  # active ports, of InfiniBand or RoCE


@dataclass(frozen=True)
class Limits:
    """What ulimit says; None: unlimited."""

    open_files: int | None = None
    locked_memory: int | None = None


@dataclass(frozen=True)
class Facts:
    """All that is known of the machine. The default knows nothing, and no rule has anything to say of it."""

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
    """Something wrong with the machine. error: training fails or is wrong; warning: it may; hint: good to know."""

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
    text: str  # what agreed, or what went wrong


@dataclass(frozen=True)
class Report:
    """Everything of one call of `kenotron doctor`."""

    version: int
    time: str  # UTC
    seconds: float
    passed: bool
    facts: Facts
    findings: list[Finding]
    self_tests: list[SelfTest]
