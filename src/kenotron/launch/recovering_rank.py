"""The main program of a process of `recovery`: ``python -m kenotron.launch.recovering_rank FOLDER LOGS PORT NUMBER``.

It imports everything, waits for a generation in which it has a place, does the work of that rank, and waits again if
another rank fails. FOLDER is the launcher's temporary folder, as in `rank`; rank r > 0 writes to LOGS/r.log; PORT is
the port of the launcher's store:

    ready/2          process 2 has imported everything
    generation/1     {"0": 0, "2": 1}: in generation 1 process 0 is rank 0 and process 2 is rank 1
    hang/0           the ranks that hang in generation 0, and the report
    left/0/0         process 0 has left the group of generation 0
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from kenotron.config import Config
from kenotron.config.errors import PeerFailed
from kenotron.launch import leave, work_as_rank, work_on_ranks
from kenotron.launch.environment import end_with_parent
from kenotron.launch.error_records import ENDED_BY_ANOTHER, record
from kenotron.launch.failures import Watch
from kenotron.launch.rank import note, read_work
from kenotron.launch.recovery import LEAVE_WITHIN_S, LOOK_EVERY_S
from kenotron.models import skeleton
from kenotron.parallel.device import memory
from kenotron.storage.files import replace_file

FOREVER = timedelta(days=365)
LEAST_LEAK_BYTES = 256 << 20
CPU = torch.device("cpu")
TRAINING = ("training.build", "parallel.data", "parallel.tensor", "parallel.pipeline", "checkpoint.tensor_writer")


def main() -> None:
    """Work in each place that this process gets, until the work of one is done, and exit with its code."""
    folder, logs, port, number = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on the terminal is only for processes with a rank
    warm_up(folder)
    console = os.dup(1), os.dup(2)
    redirect(folder / f"process-{number}.log")
    faulthandler.enable()  # writes the Python stack of a crash in native code to the log
    before = memory(CPU)["allocated"]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"ready/{number}", "")
    generation = 0
    while True:
        key = f"generation/{generation}"
        store.wait([key], FOREVER)
        rank = json.loads(store.get(key)).get(number)
        if rank is not None:
            take_place(rank, generation, folder, logs, console)
            code = run(folder, generation, store)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            if code is not None:
                os._exit(code)  # other threads may wait for ranks that are gone
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            gc.collect()  # the model of this generation, before the next one is built
            if keeps_memory(before):
                os._exit(ENDED_BY_ANOTHER)  # another process takes this place, too
            store.set(f"left/{generation}/{number}", "")
        generation += 1


def warm_up(folder: Path) -> None:
    """Import the modules that the work would import late, and build the model once, to save seconds after a fault."""
    for module in ("torch.distributed.fsdp", *(f"kenotron.{name}" for name in TRAINING)):
        importlib.import_module(module)
    config, _, _ = read_work(folder)
    if isinstance(config, Config):
        skeleton(config.model)
    gc.collect()
    gc.freeze()  # later collections skip imported objects, which takes 0.2 s less


def keeps_memory(before: int) -> bool:
    """Return whether most of a run's memory is still held after it, as FSDP2 does after an error.

    `before` is the memory before the run. On a GPU, 256 MiB are enough, because the next run has to fit beside them.
    """
    if torch.cuda.is_initialized() and torch.cuda.memory_allocated() > LEAST_LEAK_BYTES:
        return True
    now = memory(CPU)
    return now["allocated"] - before > max((now["peak_allocated"] - before) / 2, LEAST_LEAK_BYTES)


def take_place(rank: int, generation: int, folder: Path, logs: Path, console: tuple[int, int]) -> None:
    """Set environment, output and process id file as if this process had been started as `rank`."""
    records = folder / f"generation-{generation}"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(records / f"{rank}.json")}
    if rank == 0:
        os.dup2(console[0], 1)
        os.dup2(console[1], 2)
    else:
        redirect(logs / f"{rank}.log")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    replace_file(folder / f"{rank}.pid", str(os.getpid()).encode(), durable=False)


def redirect(log: Path) -> None:
    """Append the output of this process to `log` from now on."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def run(folder: Path, generation: int, store: dist.TCPStore) -> int | None:
    """Do the work of `folder` in the group of `generation`; return the exit code, or None if another rank failed."""

    def report_hang(ranks: Sequence[int], report: str) -> None:
        store.set(f"hang/{generation}", json.dumps({"ranks": list(ranks), "report": report}))

    try:
        config, work, options = read_work(folder)
        if config.parallelism.world_size == 1:
            work_on_ranks(config, work, **options)
        else:
            group = dist.PrefixStore(f"group/{generation}", store)
            release = partial(break_connections, store.port)
            times = {"leave_within_s": LEAVE_WITHIN_S, "look_every_s": 2 * LOOK_EVERY_S}
            watch = partial(Watch, report_hang=report_hang, release=release, **times)
            work_as_rank(config, work, options, group, watch)
        leave()
    except KeyboardInterrupt:
        return 130
    except PeerFailed as error:
        note(f"left the group because of {error}")
        break_connections(store.port)
        leave()
        return None
    except Exception as error:
        note(traceback.format_exc())
        return record(error)
    return 0


def break_connections(store_port: int) -> None:
    """Shut down this process's connections to other ranks, so that collectives of both ends raise errors.

    Gloo closes them only when its groups are freed, which FSDP2 prevents after an error, and its abort leaves the other
    ranks waiting. They are all connections of the loopback interface except those to the store.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd") if sys.platform.startswith("linux") else ()):
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                address, port = connection.getpeername()[:2]
                if address.startswith(("127.", "::1")) and port != store_port:
                    connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
