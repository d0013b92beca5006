"""A process that imports torch once and forks a fresh child for every ``kenotron`` command.

A child is a process of its own: it can be killed, sent signals, and its exit code read, but it starts in
milliseconds instead of seconds.

    with Nursery() as nursery:
        child = nursery.start("train", "tiny.yaml", folder=tmp_path)
        os.kill(child.pid, signal.SIGTERM)
        child.wait().code                                   # 0

`die_at=n` makes a child kill itself (SIGKILL) at its n-th file-system event below its folder: opening a file to write,
making, renaming or removing something. So every moment of a save can be hit, and hit again.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kenotron.launch.environment import end_with_parent
from support.preload import PRELOAD
from support.tiny_run import environment

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
        answer = self.nursery.read()
        said = [(self.folder / name).read_text() for name in ("stdout.txt", "stderr.txt")]
        return Finished(answer["code"], *said)


class Nursery:
    """One child at a time."""

    def __init__(self, **more: str) -> None:
        here, outer = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")  # a checkout that is not installed
        paths = os.pathsep.join(filter(None, [here, outer]))
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(Path.cwd(), **more) | {"PYTHONPATH": paths},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def start(self, *arguments: str | Path, folder: Path, die_at: int = 0, env: dict[str, str] | None = None) -> Child:
        """``kenotron <arguments>`` in `folder`; its output goes to stdout.txt and stderr.txt there."""
        request = {"arguments": [str(a) for a in arguments], "folder": str(folder), "die_at": die_at, "env": env or {}}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Child(self, self.read()["pid"], folder)

    def run(self, *arguments: str | Path, folder: Path, **options: Any) -> Finished:
        return self.start(*arguments, folder=folder, **options).wait()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the nursery has died"
        return json.loads(line)


# ---- below: the nursery's own process ----------------------------------------------------------------------


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            live(request)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def live(request: dict[str, Any]) -> None:
    """The whole life of a child."""
    from kenotron.cli import main

    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    code: Any = 1
    try:
        os.chdir(request["folder"])
        os.environ.update(request["env"])
        for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if request["die_at"]:
            sys.addaudithook(_Fuse(request["folder"], request["die_at"]))
        main(request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


if __name__ == "__main__":
    end_with_parent()
    for module in PRELOAD:
        importlib.import_module(module)
    gc.freeze()  # a child's garbage collection would touch, and so copy, every page
    serve()
