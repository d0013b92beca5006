"""Jobs: submitted, recorded beside their logs, looked up and cancelled.

logs/slurm/tiny-20261123_101500/
├── config.yaml     what the job runs, overrides included
├── job.sbatch      sbatch job.sbatch submits it once more
├── job.json        {"id": "4217", "name": "tiny", "run": "tiny", …}
└── 4217.log        output of all ranks; a requeued job appends to it
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kenotron.config.errors import InputError, nearest
from kenotron.storage.files import replace_file

RECORD = "job.json"
SCRIPT = "job.sbatch"


@dataclass(frozen=True)
class JobRecord:
    """A job that was submitted. `log` is the file of its output, `metrics` what the run writes, of each array task."""

    id: str
    name: str
    folder: str
    log: str
    metrics: list[str]


def submit(folder: Path, name: str, log: str, metrics: Sequence[Path], after: str | None = None) -> JobRecord:
    """Submit `folder`'s script, after the end of job `after`, and record it.

    `log` has ``{id}`` for the number of the job. Raises InputError where Slurm refuses it, in Slurm's words.
    """
    order = ["sbatch", "--parsable"] + ([f"--dependency=afterany:{after}"] if after else [])
    number = _slurm([*order, str(folder / SCRIPT)]).split(";")[0].strip()
    record = JobRecord(number, name, str(folder), log.format(id=number), [str(path) for path in metrics])
    replace_file(folder / (f"job-{number}.json" if after else RECORD), json.dumps(asdict(record), indent=2).encode())
    return record


def records(logs: Path) -> list[JobRecord]:
    """The jobs submitted with `logs` as `logging.log_dir`, the newest last. Raises InputError: none was."""
    found = []
    for path in (logs / "slurm").glob("**/job*.json"):
        try:
            found.append(JobRecord(**json.loads(path.read_text())))
        except (ValueError, TypeError):  # a disk was full
            print(f"warning: skipping {path}: it is not a record of a job", file=sys.stderr)
    if not found:
        raise InputError(f"no job was submitted with logging.log_dir {logs}; --log-dir names another")
    return sorted(found, key=lambda record: int(record.id))


def find(logs: Path, job: str | None) -> JobRecord:
    """The job of a number or name, the newest without one; of a chain the last. Raises InputError that names what there
    is.
    """
    found = records(logs)
    fitting = [record for record in found if job in (None, record.id, record.name)]
    if not fitting:
        names = sorted({name for record in found for name in (record.id, record.name)})
        raise InputError(f"no job {job!r} in {logs}{nearest(str(job), names)}")
    return fitting[-1]


def chain_of(logs: Path, record: JobRecord) -> list[JobRecord]:
    """The jobs that were submitted together as a chain, in order; one that was submitted alone."""
    return [each for each in records(logs) if each.folder == record.folder]


def states(found: Sequence[JobRecord]) -> list[str]:
    """Slurm's word for each job's state, with how long it has run and its limit, or why it waits.

    Slurm is asked once for what is queued or runs and once for what has ended, however many jobs there are.
    """
    known: dict[str, str] = {}
    order = ["squeue", "--me", "--noheader", "--format", "%F|%T %M of %l %R"]
    for line in _slurm(order, missing_is_empty=True).splitlines():
        number, _, said = line.strip().partition("|")
        known.setdefault(number, said)
    ended = [record.id for record in found if record.id not in known]
    if ended and shutil.which("sacct"):
        order = ["sacct", "--jobs", ",".join(ended), "--noheader", "--parsable2", "--allocations"]
        for line in _slurm([*order, "--format=JobID,State,Elapsed,ExitCode"], missing_is_empty=True).splitlines():
            number, *words = line.strip().split("|")
            known.setdefault(number.split("_")[0], " ".join(words))
    return [known.get(record.id, "ended") for record in found]


def cancel(found: Sequence[JobRecord]) -> None:
    """Cancel jobs: their ranks get SIGTERM, and save if Slurm leaves them the time (its KillWait)."""
    _slurm(["scancel", *(["--quiet"] if len(found) > 1 else []), *(record.id for record in found)])  # some have ended


def _slurm(command: list[str], missing_is_empty: bool = False) -> str:
    if shutil.which(command[0]) is None:
        instead = ", or add --dry-run" if command[0] == "sbatch" else ""
        raise InputError(f"{command[0]} was not found; run this where Slurm's commands are{instead}")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not missing_is_empty:
        raise InputError(f"{command[0]}: {' '.join(done.stderr.split())}")
    return done.stdout if not done.returncode else ""
