"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, for the time of a test session.

Needs root, slurm-wlm (22.05 or later) and munge; `make test-slurm` installs them on Debian. Both nodes are this
machine, so the ranks of a job meet at 127.0.0.1.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kenotron.launch.environment import end_with_parent
from support.tiny_run import wait_until

NODES = ("n1", "n2")
CORES = 2

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
JobRequeue=1
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=10
MinJobAge=300
OverTimeLimit=0
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def available() -> str | None:
    """What is missing for a cluster here; None if it can be started."""
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program) is None:
            return f"{program} is not installed; `make test-slurm` does that"
    return None if os.geteuid() == 0 else "Slurm's daemons want root"


class Cluster:
    """Two nodes; `conf` is the file that ``SLURM_CONF`` names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until both nodes are idle."""
        host = socket.gethostname()
        ports = _free_ports(3)
        here = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={CORES} RealMemory={_memory_mb()} State=UNKNOWN"
        nodes = [f"NodeName={name} Port={port} {here}" for name, port in zip(NODES, ports[1:])]
        (self.folder / "state").mkdir()
        text = CONFIGURATION.format(host=host, controller=ports[0], folder=self.folder, nodes="\n".join(nodes))
        self.conf.write_text(text)
        os.environ["SLURM_CONF"] = str(self.conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)
        paths = [f"--{name}={self.folder}/munge.{suffix}" for name, suffix in MUNGE_FILES.items()]
        self._run("munged", ["munged", "--foreground", "--force", f"--key-file={key}", *paths])
        wait_until(lambda: (self.folder / "munge.socket").exists(), 10, lambda: "no munged")
        self._run("slurmctld", ["slurmctld", "-D", "-c"])
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self.states() == ["idle", "idle"], 60, lambda: "no two idle nodes")

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._run(name, ["slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """End a node as a power cut does: its daemon, and whatever runs below it."""
        daemon = self.daemons.pop(name)
        for process in [*_descendants(daemon.pid), *_steps_of(self._log(name))]:
            _kill(process)
        daemon.kill()
        daemon.wait()

    def states(self) -> list[str]:
        """Slurm's word for each node."""
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True)
        return [line.rstrip("*") for line in done.stdout.split()]

    def job_state(self, job: str) -> str:
        """``RUNNING``, …, of a job that is in the controller's memory."""
        done = subprocess.run(["scontrol", "-o", "show", "job", job], capture_output=True, text=True)
        fields = dict(field.split("=", 1) for field in done.stdout.split() if "=" in field)
        return fields.get("JobState", "GONE")

    def stop(self) -> None:
        """End all daemons and their jobs."""
        for daemon in reversed(self.daemons.values()):
            for process in _descendants(daemon.pid):
                _kill(process)
            daemon.kill()
            daemon.wait()
        for name in NODES:
            for process in _steps_of(self._log(name)):
                _kill(process)

    def _log(self, node: str) -> Path:
        return self.folder.resolve() / f"slurmd-{node}.log"

    def _run(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            options: dict[str, Any] = {"start_new_session": True, "preexec_fn": end_with_parent}
            self.daemons[name] = subprocess.Popen(command, stdout=log, stderr=log, **options)


MUNGE_FILES = {"socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A running cluster, whose ``SLURM_CONF`` is in this process's environment."""
    before = os.environ.get("SLURM_CONF")
    running = Cluster(folder)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before


def _memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _descendants(process: int) -> list[int]:
    found = []
    for child in _children(process):
        found += [*_descendants(child), child]
    return found


def _children(process: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def _steps_of(log: Path) -> list[int]:
    """The slurmstepd processes that write to a node's `log`, and their children: they are not below its slurmd."""
    found = []
    for process in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            if Path(f"/proc/{process}/comm").read_text().strip() == "slurmstepd" and log in _open_files(process):
                found += [*_descendants(process), process]
        except OSError:  # it has ended
            continue
    return found


def _open_files(process: int) -> list[Path]:
    return [handle.readlink() for handle in Path(f"/proc/{process}/fd").iterdir()]


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return
