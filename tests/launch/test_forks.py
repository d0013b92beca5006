"""Processes that are copies of another: how they end is seen, and they end with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kenotron.config.errors import RunFailed
from kenotron.launch.forks import ForkedProcess, ForkServer

PROGRAM = """
import os, sys, time
from kenotron.launch.environment import end_with_parent
from kenotron.launch.forks import serve
imported = time.time_ns()
number = serve(int(sys.argv[1]), int(sys.argv[2]))
end_with_parent()
open(f"{number}.txt", "w").write(f"{os.getpid()} {imported}")
if number >= 10:
    sys.exit(number)
time.sleep(100)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.chdir(tmp_path)
    started = ForkServer([sys.executable, "-c", PROGRAM], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    yield started
    started.end()


def alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def code_of(process: ForkedProcess) -> int | None:
    """The exit code, when it has ended."""
    until = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    return process.poll()


def test_copies_run_end_with_their_codes_and_are_of_one_process(server: ForkServer) -> None:
    ended, killed, lives = (server.start(number) for number in (17, 1, 2))
    assert code_of(ended) == ended.poll() == 17
    assert killed.poll() is None
    killed.kill()
    assert code_of(killed) == -signal.SIGKILL
    killed.kill()  # nothing is left to kill: its id may be another process's
    assert lives.poll() is None
    written = [Path(f"{number}.txt") for number in (17, 2)]
    until = time.monotonic() + 5
    while not (written[1].exists() and written[1].read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    (first, imported), (second, same) = (file.read_text().split() for file in written)
    assert (int(first), int(second), imported) == (ended.pid, lives.pid, same)


def test_copies_end_with_the_server(server: ForkServer) -> None:
    process = server.start(1)
    until = time.monotonic() + 5
    while not Path("1.txt").exists() and time.monotonic() < until:  # it ends with its parent from here on
        time.sleep(0.01)
    os.kill(server._server.pid, signal.SIGKILL)
    assert code_of(process) == -signal.SIGKILL
    while alive(process.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not alive(process.pid)
    with pytest.raises(RunFailed, match="ended with exit code -9"):
        server.start(2)


def test_a_server_that_cannot_start_is_an_error() -> None:
    server = ForkServer([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ))
    with pytest.raises(RunFailed, match="ended with exit code 3"):
        server.start(0)
    server.end()
