"""Processes that start in milliseconds: copies (fork) of one that has imported everything and waits.

    launcher   ── "2\\n" ──────▶   server ── fork ──▶ process 2
               ◀── "2 4711\\n"        process 2 has process id 4711
               ◀── "2 4711 -9\\n"     process 2 was killed by SIGKILL

The server never trains and starts no threads. On Linux, for ranks on CPUs: a process that has used CUDA cannot be
copied, and macOS ends copies of one that has used its libraries.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence

from kenotron.config.errors import RunFailed


class ForkServer:
    """The launcher's end: starts the server with `command`, to which two descriptors are appended (`serve`)."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        descriptors = commands, answers
        arguments = [*command, *map(str, descriptors)]
        self._server = subprocess.Popen(arguments, env=env, pass_fds=descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._unread = b""
        self.ids: dict[int, int] = {}  # number of a process → its id
        self.codes: dict[int, int] = {}  # number → exit code, of those that have ended

    def start(self, number: int) -> ForkedProcess:
        """Process `number`, once it runs: the first waits for the server's imports. Raises RunFailed without one."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, b"%d\n" % number)
        while number not in self.ids:
            self.read(wait=True)
            if self._server.returncode is not None:
                raise RunFailed(
                    f"the process whose copies are the ranks ended with exit code {self._server.returncode}; its "
                    f"output is above"
                )
        return ForkedProcess(self, number)

    def read(self, wait: bool = False) -> None:
        """What the server has said meanwhile; `wait`: something at least, or that it is gone."""
        while select.select([self._answers], [], [], None if wait else 0)[0]:
            chunk = os.read(self._answers, 65536)
            if not chunk:  # it is gone, and its copies with it
                self.codes |= {number: -signal.SIGKILL for number in self.ids if number not in self.codes}
                self._server.wait()
                return
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            for line in lines:
                number, process_id, *code = map(int, line.split())
                self.ids[number] = process_id
                if code:
                    self.codes[number] = code[0]
            wait = False

    def end(self) -> None:
        """Kill the server, and with it the processes that are left."""
        self._server.kill()
        self._server.wait()
        os.close(self._commands)
        os.close(self._answers)


class ForkedProcess:
    """What `recovery` uses of a `subprocess.Popen`."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self._number, self.pid = server, number, server.ids[number]

    def poll(self) -> int | None:
        """Its exit code (-9: killed by SIGKILL); None while it runs."""
        self._server.read()
        return self._server.codes.get(self._number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def serve(commands: int, answers: int) -> int:
    """The server's end: copies of this process as `commands` says; returns in each of them, with its number.

    Exits when the launcher has closed `commands`.
    """
    numbers: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([commands, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            for process_id, code in _ended(list(numbers)):
                os.write(answers, b"%d %d %d\n" % (numbers.pop(process_id), process_id, code))
        if commands in ready:
            chunk = os.read(commands, 4096)
            if not chunk:
                os._exit(0)
            for number in map(int, chunk.split()):
                process_id = os.fork()
                if process_id == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, before)
                    for descriptor in (commands, answers, woken, wake):
                        os.close(descriptor)
                    return number
                numbers[process_id] = number
                os.write(answers, b"%d %d\n" % (number, process_id))


def _ended(process_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Those that have ended, and their exit codes."""
    found = [os.waitpid(process_id, os.WNOHANG) for process_id in process_ids]
    return [(process_id, os.waitstatus_to_exitcode(status)) for process_id, status in found if process_id]
