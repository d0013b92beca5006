"""The main program of a rank that `local.start_ranks` started: ``python -m kenotron.launch.rank FOLDER``.

FOLDER is the launcher's temporary folder: it has the config and the work of the ranks, and gets their process ids, for
signals. An error is written to the file that torch's launcher reads, and to the rank's log; the launcher reports it.
"""

import faulthandler
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from kenotron.config.errors import PeerFailed
from kenotron.launch.environment import end_with_parent
from kenotron.launch.error_records import ENDED_BY_ANOTHER, record
from kenotron.launch.functions import RankConfig
from kenotron.storage.files import replace_file


def main() -> None:
    """Run the work in the folder of the first argument, and exit with its code."""
    end_with_parent()
    folder = Path(sys.argv[1])
    replace_file(folder / f"{os.environ['RANK']}.pid", str(os.getpid()).encode(), durable=False)
    if os.environ["RANK"] != "0":
        os.dup2(1, 2)  # one log file from here on; torch's launcher opens a second one for stderr
    faulthandler.enable()  # writes the Python stack of a crash in native code to the log
    code = run(folder)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code:
        os._exit(code)  # other threads may wait for ranks that are gone


def run(folder: Path) -> int:
    """Do the work of `folder` and return the exit code."""
    from kenotron.launch import work_on_ranks

    try:
        config, work, options = read_work(folder)
        work_on_ranks(config, work, **options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if isinstance(error, PeerFailed):
            note(f"ended because of {error}")
            return ENDED_BY_ANOTHER
        note(traceback.format_exc())
        return record(error)
    return 0


def read_work(folder: Path) -> tuple[RankConfig, Callable[..., Any], dict[str, Any]]:
    """Return the config, function and options that `local.write_work` wrote."""
    content = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    config = resolve_name(content["config_class"]).model_validate(content["config"])
    return config, resolve_name(content["work"]), content["options"]


def note(text: str) -> None:
    """Write to this rank's log file; rank 0 has none, because it shares the launcher's console."""
    if os.environ["RANK"] != "0":
        print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
