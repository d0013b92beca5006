"""Check that all machines of a run see the same checkpoint folder, because all ranks write to each checkpoint."""

import socket
import time
import uuid
from pathlib import Path

from kenotron.config.errors import InputError
from kenotron.parallel.ranks import gather, run_on_rank0

SEEN_WITHIN_S = 15.0  # network file systems show a new file to other machines with a delay
SEEN_AT_LAST_S = 120.0  # NFS may cache the entries of a folder for 60 s


def check_shared(folder: Path, is_shared: bool = False) -> None:
    """Raise InputError on every rank if a rank does not see in `folder` the file that rank 0 writes there.

    With `is_shared`, as the config says, wait longer.
    """

    def write() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        name = f".seen-by-all-{uuid.uuid4().hex}"
        (folder / name).touch()
        return name

    name, seconds = run_on_rank0(write), SEEN_AT_LAST_S if is_shared else SEEN_WITHIN_S
    blind = sorted({machine for machine in gather(_machine_without(folder / name, seconds)) if machine})
    run_on_rank0(lambda: (folder / name).unlink(missing_ok=True))
    if blind:
        raise InputError(
            f"checkpoints.checkpoints_path: {folder} is not the same folder on all machines: {', '.join(blind)} "
            f"{'does' if len(blind) == 1 else 'do'} not see what rank 0 writes; choose one on a shared file system"
        )


def _machine_without(path: Path, seconds: float) -> str | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.parent.is_dir() and path.name in {entry.name for entry in path.parent.iterdir()}:
            return None
        time.sleep(0.2)
    return socket.gethostname()
