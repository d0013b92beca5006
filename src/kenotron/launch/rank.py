"""What a process that `local.start_ranks` started runs: ``python -m kenotron.launch.rank FOLDER``.

FOLDER is the launcher's own for the time of the run: the config comes that way, and this rank's process id goes back,
for signals; what went wrong goes to the file that torch's launcher reads. The launcher tells it, so this process does
not, except in its own log file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path

from kenotron.config.errors import InputError


def main() -> None:
    folder = Path(sys.argv[1])
    temporary = folder / f"{os.environ['RANK']}.tmp"
    temporary.write_text(str(os.getpid()))
    temporary.rename(temporary.with_suffix(".pid"))  # whole or not there
    if os.environ["RANK"] != "0":
        os.dup2(1, 2)  # one log file; until here it was another, because torch's launcher opens one for each
    faulthandler.enable()  # a crash in native code leaves its Python stack there
    code = run(folder)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code:
        os._exit(code)  # what else is open may wait for ranks that are gone


def run(folder: Path) -> int:
    """The exit code."""
    from kenotron.config import load
    from kenotron.launch import leave, work_on_ranks

    try:
        given = json.loads((folder / "work.json").read_text(encoding="utf-8"))
        work_on_ranks(load(folder / "config.yaml"), given["work"], **given["options"])
        leave()
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from kenotron.launch.failures import ENDED_BY_ANOTHER, PeerFailed

        if isinstance(error, PeerFailed):
            _note(f"ended because of {error}")
            return ENDED_BY_ANOTHER
        _note(traceback.format_exc())
        return record(error)
    return 0


def record(error: Exception) -> int:
    """Leave `error` where the launcher finds it, in the form of torch's own records; returns the exit code."""
    code = 2 if isinstance(error, InputError) else 1
    stack = "" if _written_to_be_read(error) else "".join(traceback.format_exception(error))
    details = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    content = {"message": {"message": in_a_line(error), "errorCode": code, "extraInfo": details}}
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").rename(path)
    return code


def in_a_line(error: BaseException) -> str:
    """As the command line says it."""
    return str(error) if _written_to_be_read(error) else f"{type(error).__name__}: {error}"


def _written_to_be_read(error: BaseException) -> bool:
    """Whether the message says all, so that nobody needs a traceback."""
    return isinstance(error, InputError) or type(error).__name__ == "RunFailed"


def _note(text: str) -> None:
    """Into this rank's log file; rank 0 has none, the console is the launcher's."""
    if os.environ["RANK"] != "0":
        print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
