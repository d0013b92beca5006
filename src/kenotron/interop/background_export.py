"""Run `to_hf` in a separate process, at low priority, while the run that saved the checkpoint trains on.

    export = BackgroundExport(path, path / "hf")
    export.ended                # False for a while
    export.wait()               # the number of bytes written; InputError if it failed

The process reads only the checkpoint's files. It ignores the signals that a scheduler sends to all processes.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kenotron.config.dotted import search_path
from kenotron.config.errors import InputError
from kenotron.storage.background import stay_in_background

MAIN = "from kenotron.interop.background_export import main; main()"


class BackgroundExport:
    """A process that exports checkpoint `source` to the new folder `target`; it starts at once."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(source), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C on the terminal stops only the training process
        )

    @property
    def ended(self) -> bool:
        """Whether the process has ended, so that `wait` returns at once."""
        return self._process.poll() is not None

    def wait(self) -> int:
        """Wait for the end and return the bytes of the weight files. Raises InputError if the export failed."""
        output, _ = self._process.communicate()
        with self._errors:
            if self._process.returncode:
                self._errors.seek(0)
                lines = self._errors.read().decode(errors="replace").splitlines() or [""]
                raise InputError(f"the process ended with exit code {self._process.returncode}: {lines[-1]}")
        outcome = json.loads(output.splitlines()[-1])
        if "problem" in outcome:
            raise InputError(outcome["problem"])
        return outcome["bytes"]

    def stop(self) -> None:
        """Kill the process; its temporary folder may be left behind."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def main() -> None:
    """Run in the child process: export `sys.argv[1]` to `sys.argv[2]` and print the outcome as JSON."""
    stay_in_background()
    from kenotron.interop.exporting import to_hf

    try:
        outcome: dict[str, object] = {"bytes": to_hf(*sys.argv[1:], verify=False).bytes}
    except InputError as error:
        outcome = {"problem": str(error)}
    print(json.dumps(outcome), flush=True)
