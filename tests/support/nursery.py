"""A process that has imported torch and forks a fresh child for every ``kenotron`` command.

A child is a process of its own: it can be killed, sent signals, and its exit code read, but it starts in
milliseconds instead of seconds.

    with Nursery() as nursery:
        child = nursery.start("train", "tiny.yaml", folder=tmp_path)
        os.kill(child.pid, signal.SIGTERM)
        child.wait().code                                   # 0

`die_at=n` makes a child kill itself (SIGKILL) at its n-th file-system event below its folder: opening a file to write,
making, renaming or removing something. So every moment of a save can be hit, and hit again.

The ranks that a child starts are its forks, too, where the command starts interpreters: `fork_ranks=False` lets it.
`nursery.torchrun("run_train.py", …, ranks=2, folder=tmp_path)` is torchrun with a script of the repository.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from kenotron.launch.environment import end_with_parent
from support.preload import fork_server, search_path
from support.tiny_run import REPOSITORY, environment

EVENTS = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


@dataclass(frozen=True)
class Finished:
    """Exit code (-9: killed), and what was said."""

    code: int
    stdout: str
    stderr: str


class Child:
    def __init__(self, nursery: Nursery, pid: int, folder: Path) -> None:
        self.nursery, self.pid, self.folder = nursery, pid, folder

    def runs(self) -> bool:
        """Whether it has not ended yet."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def wait(self) -> Finished:
        code = self.nursery.pipe.recv()
        said = [(self.folder / name).read_text() for name in ("stdout.txt", "stderr.txt")]
        return Finished(code, *said)


class Nursery:
    """One child at a time."""

    def __init__(self, **more: str) -> None:
        env = environment(Path.cwd(), **more) | {"PYTHONPATH": search_path()}
        context = fork_server()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, env))
        self.process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()
        self.process.kill()  # with the child that a test which failed has left
        self.process.join()

    def start(
        self,
        *arguments: str | Path,
        folder: Path,
        die_at: int = 0,
        env: dict[str, str] | None = None,
        fork_ranks: bool = True,
        torchrun: bool = False,
    ) -> Child:
        """``kenotron <arguments>`` in `folder`; its output goes to stdout.txt and stderr.txt there."""
        options = {"folder": str(folder), "die_at": die_at, "env": env or {}, "fork_ranks": fork_ranks}
        request = {"arguments": [str(a) for a in arguments], "torchrun": torchrun, **options}
        self.pipe.send(request)
        return Child(self, self.pipe.recv(), folder)

    def run(self, *arguments: str | Path, folder: Path, **options: Any) -> Finished:
        return self.start(*arguments, folder=folder, **options).wait()

    def torchrun(self, script: str, *arguments: str | Path, ranks: int, folder: Path, **options: Any) -> Finished:
        given = ("--standalone", f"--nproc_per_node={ranks}", REPOSITORY / script, *arguments)
        return self.run(*given, folder=folder, torchrun=True, **options)


# ---- below: the nursery's own process ----------------------------------------------------------------------


def serve(pipe: Connection, env: dict[str, str]) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(env)
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            pipe.close()
            live(request)
        pipe.send(pid)
        _, status = os.waitpid(pid, 0)
        pipe.send(os.waitstatus_to_exitcode(status))


def live(request: dict[str, Any]) -> None:
    """The whole life of a child."""
    from kenotron.cli import main

    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    code: Any = 1
    try:
        os.chdir(request["folder"])
        os.environ.update(request["env"])
        if "HF_HOME" in request["env"]:  # which is read on import
            for name in [name for name in sys.modules if name.startswith(("huggingface_hub", "transformers"))]:
                del sys.modules[name]
        for folder in request["env"].get("PYTHONPATH", "").split(os.pathsep):  # as an interpreter does when it starts
            if (path := Path(folder, "sitecustomize.py")).exists():
                runpy.run_path(str(path))
        for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if request["die_at"]:
            sys.addaudithook(_Fuse(request["folder"], request["die_at"]))
        if request["fork_ranks"]:
            from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

            subprocess_handler.Popen = _Rank  # type: ignore[misc, assignment]
        if request["torchrun"]:
            from torch.distributed.run import main
        code = _exit_code(lambda: main(request["arguments"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(program: Callable[[], Any]) -> int:
    """What an interpreter that ran it would end with."""
    try:
        program()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    return 0


class _Fuse:
    """Kills its own process at the n-th event below `folder`."""

    def __init__(self, folder: str, events: int) -> None:
        self.folder, self.left = folder, events

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in EVENTS):
            return
        path = os.path.abspath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if path.startswith(self.folder):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class _Rank:
    """What torch's launcher uses of a Popen: a fork that runs the same.

    That is ``python -P -m kenotron.launch.rank FOLDER``, and of torchrun ``python -u SCRIPT …``.
    """

    def __init__(
        self, args: tuple[str, ...], env: dict[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        assert args[1:-1] == ("-P", "-m", "kenotron.launch.rank") or args[1] == "-u", args
        assert start_new_session
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _live_as_rank(args, env, stdout, stderr)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)


def _live_as_rank(args: tuple[str, ...], env: dict[str, str], stdout: Any, stderr: Any) -> None:
    from kenotron.launch import rank

    code = 1
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        for number, file in ((1, stdout), (2, stderr)):
            if file is not None:
                os.dup2(file.fileno(), number)
        for name in ("SIGTERM", "SIGUSR1"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if args[1] == "-u":
            sys.argv = list(args[2:])
            sys.path.insert(0, str(Path(args[2]).parent))
            code = _exit_code(lambda: runpy.run_path(args[2], run_name="__main__"))
        else:
            sys.argv = [rank.__file__, args[-1]]
            rank.main()
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
