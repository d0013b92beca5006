"""The ranks of a layout on this machine, through torch's elastic launcher.

    start_ranks(config, work)       in the terminal's process
      └─ elastic_launch             torch: a store on a free port, the processes, who has died
           ├─ rank 0                console: this process's own stdout and stderr, terminal or not
           └─ rank 1                <log_dir>/<run>/ranks/1.log

Signals: SIGTERM, SIGUSR1 and Ctrl-C are handed on to the ranks, which agree on the step, save, and end with 0. A rank
that fails ends all (`failures`), and its error is raised here as if it had happened here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import yaml

from kenotron.config import dump, fill_run_name
from kenotron.config.errors import InputError
from kenotron.launch.environment import check_devices, threads_each

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from kenotron.config import Config

HANDED_ON = ("SIGTERM", "SIGUSR1", "SIGINT")


def start_ranks(config: Config, work: str, options: dict[str, Any], logs: Path | None = None) -> None:
    """Call ``work(config, mesh, device, **options)`` in as many processes as the layout needs, and wait for them.

    `work` is the dotted path of a function, `options` are what JSON can hold. What ranks other than 0 say goes to
    `logs`.

    Errors: what one of the ranks failed of, InputError or RunFailed; KeyboardInterrupt when they were stopped before
    they could save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    count = config.parallelism.world_size
    check_devices(count)
    with tempfile.TemporaryDirectory(prefix="kenotron-") as temporary, _quiet_launcher():
        folder = Path(temporary)
        logs = logs or folder / "ranks"
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        (folder / "work.json").write_text(json.dumps({"work": work, "options": options}), encoding="utf-8")
        settings = _settings(count, folder, logs)
        arguments = ["-P", "-m", "kenotron.launch.rank", str(folder)]
        with _signals_handed_on(folder, count) as handed_on:
            try:
                elastic_launch(settings, sys.executable)(*arguments)
            except ChildFailedError as error:
                _give_the_cursor_back()
                raise _cause(error.failures, bool(handed_on), config, folder, logs) from None
            except SignalException:
                raise KeyboardInterrupt from None


# ---- what the launcher is told -----------------------------------------------------------------------------


def _settings(count: int, folder: Path, logs: Path) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # any free port: two launches never meet
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle="SIGQUIT",  # the others are ours
        logs_specs=_output(count, folder, logs),
    )


def _output(count: int, folder: Path, logs: Path) -> Any:
    """Where the ranks write, and what is in their environment."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class Output(LogsSpecs):
        root_log_dir = str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for rank, variables in envs.items():
                variables |= _variables(count, folder) | {"TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json")}
            console = {0: ""}
            return LogsDest(
                stdouts=console | {rank: str(_fresh_log(logs, rank)) for rank in range(1, count)},
                stderrs=console | {rank: str(folder / f"{rank}.stderr") for rank in range(1, count)},
                error_files={rank: str(folder / f"{rank}.json") for rank in range(count)},
            )

    return Output()


def _variables(count: int, folder: Path) -> dict[str, str]:
    """What a rank's environment has beside ours and torch's own: what the user has set stays."""
    loopback = next((name for _, name in _interfaces() if name in ("lo", "lo0")), None)
    wanted = {
        "OMP_NUM_THREADS": str(threads_each(count)),
        "GLOO_SOCKET_IFNAME": loopback,  # all are on this machine, whatever its name resolves to
    }
    variables = {name: value for name, value in wanted.items() if value is not None and name not in os.environ}
    # Modules that this process finds are found there too: a script's own folder, for one.
    search = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return variables | {"KENOTRON_LAUNCH": str(folder), "PYTHONPATH": search, "PYTHONUNBUFFERED": "1"}


def _interfaces() -> list[tuple[int, str]]:
    import socket

    return socket.if_nameindex() if hasattr(socket, "if_nameindex") else []


def _fresh_log(logs: Path, rank: int) -> Path:
    """``ranks/1.log``; the one of an earlier launch gets its time into its name."""
    path = logs / f"{rank}.log"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if path.exists():
            until = datetime.fromtimestamp(path.stat().st_mtime)
            path.rename(logs / f"{rank}-until-{until:%Y%m%d_%H%M%S_%f}.log")
    except OSError as error:
        raise InputError(f"logging.log_dir: cannot write to {logs}: {error.strerror}") from error
    return path


def named(config: Config, fresh: bool) -> tuple[Config, Path]:
    """The config with one name for all ranks, and the folder of their logs. A run that goes on has its name already."""
    name = None if fresh else _earlier_name(Path(config.checkpoints.checkpoints_path))
    if name is None:
        config = fill_run_name(config, datetime.now(), os.environ.get("SLURM_JOB_ID"))
        name = config.general.run
    return config, Path(config.logging.log_dir) / name / "ranks"


def _earlier_name(root: Path) -> str | None:
    try:
        newest = (root / "latest.txt").read_text().strip()
        return str(yaml.safe_load((root / newest / "config.yaml").read_text())["general"]["run"])
    except (OSError, yaml.YAMLError, KeyError, TypeError):  # no run yet, or none that can be read: the ranks find out
        return None


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """What torch's launcher logs of a failure is a page; `_cause` says it in a line."""
    prefix = "torch.distributed.elastic"
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefix)]
    levels = {name: logging.getLogger(name).level for name in [*names, prefix]}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


# ---- signals -----------------------------------------------------------------------------------------------


@contextmanager
def _signals_handed_on(folder: Path, count: int) -> Iterator[list[int]]:
    """Within, signals go to the ranks; yields the list of those that came."""
    handed_on: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        processes = [int(path.read_text()) for path in folder.glob("*.pid")]
        handed_on.append(number)
        if len(processes) < count:  # they are just being started: the launcher ends them
            raise KeyboardInterrupt
        for process in processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue  # it has ended

    previous = {}
    if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
        previous = {number: signal.signal(number, hand_on) for number in _numbers()}
    try:
        yield handed_on
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _numbers() -> list[signal.Signals]:
    return [getattr(signal, name) for name in HANDED_ON if hasattr(signal, name)]


def _give_the_cursor_back() -> None:
    """Rank 0 hides it for its progress bar, and may have ended without showing it again."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


# ---- what went wrong ---------------------------------------------------------------------------------------


def _cause(
    failures: Mapping[int, ProcessFailure], stopped: bool, config: Config, folder: Path, logs: Path
) -> BaseException:
    """The failure that made all ranks end, as an error of this process."""
    from kenotron.train import RunFailed

    told = sorted(folder.glob("[0-9]*.json"), key=lambda path: path.stat().st_mtime_ns)
    if told:
        return _told(int(told[0].stem), json.loads(told[0].read_text())["message"], folder, logs)
    if stopped:
        return KeyboardInterrupt()
    rank = min(failures, key=lambda each: _innocence(failures[each].exitcode))
    code = failures[rank].exitcode
    how = f"was killed by {failures[rank].signal_name()}" if code < 0 else f"ended with exit code {code}"
    why = "; out of memory?" if code == -signal.SIGKILL else _cut_short(config) if code == -signal.SIGBUS else ""
    return RunFailed(f"rank {rank} {how}{why}{_last_words(rank, folder, logs)}")


def _cut_short(config: Config) -> str:
    """Why a process gets SIGBUS, and the file of tokens that shows it: what is mapped and no longer there was read."""
    from kenotron.data.formats import open_token_files
    from kenotron.data.plan import plan_stages
    from kenotron.data.token_paths import TokenPath

    why = ": a memory-mapped file was cut short while it was read"
    try:
        for source in (source for stage in plan_stages(config) for source in stage.sources):
            if isinstance(source.dataset, TokenPath):
                open_token_files(source.dataset.path, source.dataset.key, source.dataset.dtype)
    except InputError as error:
        return f"{why}: {error}"
    return why


def _told(rank: int, message: dict[str, Any], folder: Path, logs: Path) -> Exception:
    """The error that rank `rank` has recorded (`rank.record`)."""
    from kenotron.train import RunFailed

    if message["errorCode"] == 2:
        return InputError(message["message"])
    stack = message["extraInfo"]["py_callstack"].rstrip()
    if not stack:
        return RunFailed(message["message"])
    log = "" if rank == 0 or logs.is_relative_to(folder) else f"\nIts output: {logs / f'{rank}.log'}"
    return RunFailed(f"rank {rank}: {message['message']}\n{stack}{log}")


def _innocence(exit_code: int) -> int:
    """0: it died of its own; 1: it left by itself; 2: because another had failed; 3: because the launcher said so."""
    from kenotron.launch.failures import ENDED_BY_ANOTHER

    if exit_code == -signal.SIGTERM:
        return 3
    return 0 if exit_code < 0 else 2 if exit_code == ENDED_BY_ANOTHER else 1


def _last_words(rank: int, folder: Path, logs: Path) -> str:
    """The end of what a rank said that did not get as far as to an error of its own; all of it from a crash on."""
    if rank == 0:
        return ""  # said on the console
    early, log = folder / f"{rank}.stderr", logs / f"{rank}.log"
    path = early if early.exists() and early.stat().st_size else log
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    crash = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    shown = lines[-10:] if crash is None else lines[crash : crash + 40]
    return "\n".join([f"\nThe end of its output, {log}:", *(f"  {line}" for line in shown)]) if shown else ""
