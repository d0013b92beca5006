"""Clear what killed processes left in a checkpoint folder, at the start of a run.

20.tmp-3f9c0a1b/      a save: renamed to 20 if it is complete, else removed
.trash-10-77ab03c4/   a checkpoint that was being removed: removed
"""

import re
import shutil
from pathlib import Path

from kenotron.checkpoint.durable import FolderBusy, locked
from kenotron.checkpoint.folders import Report, look, publish, quiet

_TEMPORARY = re.compile(r"(\d+|latest\.txt)\.tmp-[0-9a-f]{8}")
_TRASH = re.compile(r"\.trash-\d+-[0-9a-f]{8}")


def tidy(root: Path | str, report: Report = quiet) -> None:
    """Clear what killed processes left in `root`: rank 0 calls it at the start, before `newest_complete`.

    A save that only lacks its rename is finished; other temporary folders and half-removed checkpoints are deleted.
    While another process saves there, nothing is touched.

    Raises:
        CheckpointError: this process may not write there, which is better to learn now than at the first save.
    """
    root = Path(root)
    if not root.is_dir():
        return
    try:
        with locked(root, wait_seconds=0) as held:
            if held:
                clear_leftovers(root, report)
    except FolderBusy:
        report(f"another process is saving into {root}; its files are left alone")


def clear_leftovers(root: Path, report: Report) -> None:
    """Do the work of `tidy` for a caller that holds the folder's lock."""
    for path in sorted(root.iterdir()):
        if _TRASH.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
        elif match := _TEMPORARY.fullmatch(path.name):
            _clear(path, root / match[1], report)


def _clear(path: Path, final: Path, report: Report) -> None:
    if path.is_file():
        path.unlink(missing_ok=True)
    elif not final.exists() and look(path, int(final.name)).manifest:
        publish(path, final)
        report(f"finished the save of step {final.name}, which was complete except for its name")
    else:
        shutil.rmtree(path, ignore_errors=True)
        report(f"removed {path.name}, which a killed process left")
