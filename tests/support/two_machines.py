"""Two machines on this one, and a cable between them that can be cut: network namespaces of Linux.

    with two_machines(folder) as machines:
        process = machines.start(1, ["torchrun", …], folder)      # on machine1
        machines.cut()

Each has network interfaces, a hostname, an /etc/hosts and a disk of its own; other files are shared, as on a cluster.
Needs root and Debian's iproute2; `make test-network` installs it.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support.tiny_run import REPOSITORY, environment

ADDRESSES = {1: "10.214.17.1", 2: "10.214.17.2"}
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && mount --bind "$3" "$4" && shift 4 && exec "$@"'


def available() -> str | None:
    """What is missing for two machines here; None if they can be made."""
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed; `make test-network` does that"
    name = f"kenotron-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        _ip("netns", "delete", name)
        return None
    return f"no network namespaces here, which need root: {made.stderr.strip()}"


class Machines:
    """Machines 1 and 2, each a namespace with one end of the cable. `disk`: the folder that is another one on each."""

    def __init__(self, folder: Path) -> None:
        self.names = {number: f"kenotron-{os.getpid()}-{number}" for number in ADDRESSES}
        self.hosts, self.disk = folder / "hosts", folder / "disk"
        for path in (self.disk, *map(self.disk_of, ADDRESSES)):
            path.mkdir()
        known = {f"machine{number}": address for number, address in ADDRESSES.items()} | {"localhost": "127.0.0.1"}
        self.hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items()))

    def disk_of(self, number: int) -> Path:
        """What a machine has in `disk`, as seen from outside."""
        return self.disk.with_name(f"disk{number}")

    def make(self) -> None:
        """Make both, connected."""
        for name in self.names.values():
            _ip("netns", "add", name)
        one, two = self.names.values()
        _ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", two)
        for number, name in self.names.items():
            _ip("-n", name, "address", "add", f"{ADDRESSES[number]}/30", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")

    def start(self, number: int, command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
        """Run `command` on a machine, in `folder`; what it says goes to ``machine<number>.txt`` there."""
        enter = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c", ENTER, "sh"]
        with open(folder / f"machine{number}.txt", "w") as said:
            given = (f"machine{number}", str(self.hosts), str(self.disk_of(number)), str(self.disk))
            env = environment(folder, PYTHONPATH=str(REPOSITORY / "tests"))
            whole = [*enter, *given, *command]
            return subprocess.Popen(whole, cwd=folder, env=env, stdout=said, stderr=said, text=True)

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.names[1], "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("-n", self.names[1], "link", "set", "eth0", "up")

    def processes(self, number: int) -> list[int]:
        """Ids of all processes of a machine."""
        done = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def remove(self) -> None:
        """Kill what runs on them, and remove both."""
        for number, name in self.names.items():
            for pid in self.processes(number):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Both machines, for the time of the block; `folder` has their /etc/hosts."""
    machines = Machines(folder)
    try:
        machines.make()
        yield machines
    finally:
        machines.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
