"""Start the ranks of a layout on this machine, with torch's elastic launcher.

    start_ranks(config, work)       in the terminal's process
      └─ elastic_launch             torch: a store on a free port, the processes, and which of them have died
           ├─ rank 0                console: this process's own stdout and stderr, terminal or not
           └─ rank 1                <log_dir>/<run>/ranks/1.log

SIGTERM, SIGUSR1 and Ctrl-C are forwarded to the ranks, which agree on a step, save, and exit with 0. A rank that fails
ends all ranks (`failures`), and its error is raised in this process.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from kenotron.config.dotted import search_path
from kenotron.config.errors import InputError, RunFailed, os_errors
from kenotron.launch.environment import check_devices, threads_per_rank
from kenotron.launch.error_records import ENDED_BY_ANOTHER
from kenotron.launch.functions import RankConfig, WhyKilled, function_path

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
CUT_SHORT = "a memory-mapped file was cut short while it was read"
USUAL_CAUSES: dict[int, str] = {signal.SIGKILL: "out of memory?", signal.SIGBUS: CUT_SHORT}


def start_ranks(
    config: RankConfig,
    work: Callable[..., object],
    options: dict[str, object],
    logs: Path | None = None,
    why_killed: WhyKilled | None = None,
) -> None:
    """Call ``work(config, mesh, device, **options)`` in as many processes as the layout needs, and wait for them.

    The arguments are described in `work_on_ranks`. Raises the error of the rank that failed first, InputError or
    RunFailed, or KeyboardInterrupt if the ranks were stopped before they could save.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    count = config.parallelism.world_size
    check_devices(count)
    with tempfile.TemporaryDirectory(prefix="kenotron-") as temporary, _quiet_launcher():
        folder = Path(temporary)
        logs = logs or folder / "ranks"
        write_work(folder, config, work, options)
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port, so that two launches never meet
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle="SIGQUIT",  # the other signals are forwarded
            logs_specs=_log_specs(count, folder, logs),
        )
        arguments = ["-P", "-m", "kenotron.launch.rank", str(folder)]
        with signals_forwarded(folder, count) as forwarded:
            try:
                elastic_launch(settings, sys.executable)(*arguments)
            except ChildFailedError as error:
                show_cursor()
                codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
                raise cause(codes, bool(forwarded), why_killed, folder, logs) from None
            except SignalException:
                raise KeyboardInterrupt from None


def write_work(folder: Path, config: RankConfig, work: Callable[..., object], options: dict[str, object]) -> None:
    """Write the function and its arguments to ``work.json``, for `rank.read_work`."""
    content = {
        "work": function_path(work),
        "config_class": function_path(type(config)),
        "config": config.model_dump(mode="json", by_alias=True),
        "options": options,
    }
    (folder / "work.json").write_text(json.dumps(content), encoding="utf-8")


# ---- the ranks' output and environment -----------------------------------------------------------------------


def _log_specs(count: int, folder: Path, logs: Path) -> Any:
    """Return torch's specification of the ranks' output files, which also sets their environment variables."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    class Output(LogsSpecs):
        root_log_dir = str(folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for rank, variables in envs.items():
                variables |= rank_variables(count, folder) | {"TORCHELASTIC_ERROR_FILE": str(folder / f"{rank}.json")}
            console = {0: ""}
            return LogsDest(
                stdouts=console | {rank: str(fresh_log(logs, rank)) for rank in range(1, count)},
                stderrs=console | {rank: str(folder / f"{rank}.stderr") for rank in range(1, count)},
                error_files={rank: str(folder / f"{rank}.json") for rank in range(count)},
            )

    return Output()


def rank_variables(count: int, folder: Path) -> dict[str, str]:
    """Return the environment variables of a rank, except torch's own and those that the user has set."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_rank(count)),
        "GLOO_SOCKET_IFNAME": loopback,  # all ranks are on this machine, whatever its name resolves to
    }
    variables = {name: value for name, value in defaults.items() if value is not None and name not in os.environ}
    return variables | {"KENOTRON_LAUNCH": str(folder), "PYTHONPATH": search_path(), "PYTHONUNBUFFERED": "1"}


def fresh_log(logs: Path, rank: int) -> Path:
    """Return ``ranks/1.log``, after renaming the log of an earlier launch to ``1-until-<time>.log``."""
    path = logs / f"{rank}.log"
    with os_errors(f"logging.log_dir: cannot write to {logs}"):
        logs.mkdir(parents=True, exist_ok=True)
        if path.exists():
            until = datetime.fromtimestamp(path.stat().st_mtime)
            path.rename(logs / f"{rank}-until-{until:%Y%m%d_%H%M%S_%f}.log")
    return path


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence the page that torch's launcher logs about a failure; `cause` returns the error to report."""
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
def signals_forwarded(folder: Path, count: int) -> Iterator[list[int]]:
    """Forward signals to the ranks within the block, and yield the list of the received signals."""
    forwarded: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        processes = [int(path.read_text()) for path in folder.glob("*.pid")]
        forwarded.append(number)
        if len(processes) < count:  # the ranks are being started: the launcher ends them
            raise KeyboardInterrupt
        for process in processes:
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue

    previous = {}
    if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only there
        previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield forwarded
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def show_cursor() -> None:
    """Show the cursor, which a killed rank 0 may have hidden for its progress bar."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


# ---- the cause of a failure ---------------------------------------------------------------------------------------


def cause(
    exit_codes: Mapping[int, int], stopped: bool, why_killed: WhyKilled | None, folder: Path, logs: Path
) -> BaseException:
    """Return the failure that ended all ranks as an error of this process; `exit_codes` are of the failed ranks."""
    records = sorted(folder.glob("[0-9]*.json"), key=lambda path: path.stat().st_mtime_ns)
    if records:
        return _recorded_error(int(records[0].stem), json.loads(records[0].read_text())["message"], folder, logs)
    if stopped:
        return KeyboardInterrupt()
    rank = min(exit_codes, key=lambda rank: _suspicion(exit_codes[rank]))
    code = exit_codes[rank]
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    reason = why_killed(-code) if why_killed is not None and code < 0 else None
    reason = USUAL_CAUSES.get(-code, "") if reason is None else reason
    return RunFailed(f"rank {rank} {end}{'; ' if reason else ''}{reason}{_last_output(rank, folder, logs)}")


def _recorded_error(rank: int, message: dict[str, Any], folder: Path, logs: Path) -> Exception:
    """Return the error that rank `rank` has recorded (`error_records.record`)."""
    if message["errorCode"] == 2:
        return InputError(message["message"])
    if message["extraInfo"]["for_users"]:
        return RunFailed(message["message"])
    stack = message["extraInfo"]["py_callstack"].rstrip()
    log = "" if rank == 0 or logs.is_relative_to(folder) else f"\nIts output: {logs / f'{rank}.log'}"
    return RunFailed(f"rank {rank}: {message['message']}\n{stack}{log}")


def _suspicion(exit_code: int) -> int:
    """Return a sort key, the probable cause first: killed, exited by itself, ended by another rank, by the launcher."""
    order = {-signal.SIGTERM: 3, ENDED_BY_ANOTHER: 2}
    return order.get(exit_code, 0 if exit_code < 0 else 1)


def _last_output(rank: int, folder: Path, logs: Path) -> str:
    """Return the last output of a rank that recorded no error, starting with the native crash if there is one."""
    if rank == 0:
        return ""  # the console has it
    early, log = folder / f"{rank}.stderr", logs / f"{rank}.log"
    path = early if early.exists() and early.stat().st_size else log
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    crash = next((number for number, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
    end = lines[-10:] if crash is None else lines[crash : crash + 40]
    return "\n".join([f"\nThe end of its output, {log}:", *(f"  {line}" for line in end)]) if end else ""
