"""Call a function in a separate process with a time limit, so that a hang or crash becomes an exception of one line.

    call_limited(describe_torch, seconds=90)      its return value, or one of
    Failed("no answer within 90 s") · Failed("was killed by SIGILL") · Failed("ImportError: libcudart.so.12: …")

The function must be at the top level of a module; arguments and result are JSON values.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from kenotron.config.dotted import search_path
from kenotron.doctor.settings import anonymous
from kenotron.launch.environment import cores, end_with_parent
from kenotron.launch.functions import function_path

# Prefixes of variables of a job's ranks: the called function is not one of them, and may start its own ranks.
RANK_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "SLURM", "TORCHELASTIC", "KENOTRON_LAUNCH")


class Failed(Exception):
    """The function gave no result; the message is one line with the reason, without private data."""

    def __init__(self, message: str) -> None:
        super().__init__(anonymous(message))


def call_limited(
    function: Callable[..., Any], *arguments: object, seconds: float, environment: Mapping[str, str] | None = None
) -> Any:
    """Call ``function(*arguments)`` in a process with `environment` added to this one's. Raises Failed.

    The time limit is `seconds` on an idle machine, and longer on a busy one (`busy_factor`).
    """
    seconds *= busy_factor()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(RANK_NAMES)}
    with tempfile.TemporaryDirectory(prefix="kenotron-doctor-", ignore_cleanup_errors=True) as folder:
        result, printed = Path(folder, "result.json"), Path(folder, "output")
        with printed.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, function_path(function), json.dumps(arguments), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**inherited, "PYTHONPATH": search_path(), **(environment or {})},
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise Failed(f"no answer within {seconds:.0f} s") from None
            finally:
                _end(process)
        if code == 0 and result.exists():
            return json.loads(result.read_text())
        raise Failed(_reason(code, printed.read_text(errors="replace")))


def busy_factor() -> float:
    """Return the factor on time limits: the load per core, from 1 to 10."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 1.0
    return max(1.0, min(load / cores(), 10.0))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children; a process that waits for a dead file system is left to the kernel."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)


def _reason(code: int, output: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"ended with exit code {code}"


def main() -> None:
    """Call the function in the first argument with the values in the second; write the result to the third, a file."""
    end_with_parent()
    path, arguments, file = sys.argv[1:]
    result = resolve_name(path)(*json.loads(arguments))
    Path(file).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
