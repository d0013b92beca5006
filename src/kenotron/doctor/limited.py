"""A function called in a process of its own, with a time limit: what hangs or crashes there becomes one line here.

    call_limited(describe_torch, seconds=90)      its return value, or
    Failed("no answer within 90 s") · Failed("was killed by SIGILL") · Failed("ImportError: libcudart.so.12: …")

The function is at the top level of a module; arguments and result are JSON values.
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

# A job's ranks are not ours: what is called here starts its own, or none.
OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "SLURM", "TORCHELASTIC", "KENOTRON_LAUNCH")


class Failed(Exception):
    """The function gave no result; the message is one line that says why, without anything private."""

    def __init__(self, message: str) -> None:
        super().__init__(anonymous(message))


def call_limited(
    function: Callable[..., Any], *arguments: object, seconds: float, environment: Mapping[str, str] | None = None
) -> Any:
    """``function(*arguments)``, called in a process with `environment` on top of this one's. Raises Failed.

    It may take `seconds` on an idle machine, and more as others keep the machine busy (`busy_factor`).
    """
    seconds *= busy_factor()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OF_A_RANK)}
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
        raise Failed(_why(code, printed.read_text(errors="replace")))


def busy_factor() -> float:
    """How many times as long things may take: processes that want to run for each core, from 1 to 10."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 1.0
    return max(1.0, min(load / cores(), 10.0))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it with all that it has started; one that waits for a dead file system is left to the kernel."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)


def _why(code: int, output: str) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"ended with exit code {code}"


def main() -> None:
    """Call the function of the first argument with the second one's values; the result goes to the third one's file."""
    end_with_parent()
    path, arguments, result = sys.argv[1:]
    found = resolve_name(path)(*json.loads(arguments))
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
