"""Submit Slurm jobs, record them beside their logs, look them up and cancel them.

logs/slurm/tiny-20261123_101500/
├── config.yaml     the config of the job, including overrides
├── job.sbatch      the script; sbatch job.sbatch submits it again
├── job.json        {"id": "4217", "name": "tiny", "folder": …, "log": …, "metrics": […]}
└── 4217.log        the output of all ranks; a requeued job appends to it
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
    """A submitted job, with the file of its output and the metrics file of each array task."""

    id: str
    name: str
    folder: str
    log: str
    metrics: list[str]


def submit(folder: Path, name: str, log: str, metrics: Sequence[Path], after: str | None = None) -> JobRecord:
    """Submit the script in `folder`, to start after the end of job `after`, and record it.

    `log` has ``{id}`` for the number of the job. Raises InputError with Slurm's message if Slurm refuses the job.
    """
    command = ["sbatch", "--parsable"] + ([f"--dependency=afterany:{after}"] if after else [])
    number = _slurm([*command, str(folder / SCRIPT)]).split(";")[0].strip()
    record = JobRecord(number, name, str(folder), log.format(id=number), [str(path) for path in metrics])
    replace_file(folder / (f"job-{number}.json" if after else RECORD), json.dumps(asdict(record), indent=2).encode())
    return record


def records(logs: Path) -> list[JobRecord]:
    """Return the jobs submitted with `logs` as logging.log_dir, the newest last. Raises InputError if there is none."""
    submitted = []
    for path in (logs / "slurm").glob("**/job*.json"):
        try:
            submitted.append(JobRecord(**json.loads(path.read_text())))
        except (ValueError, TypeError):  # a disk was full
            print(f"warning: skipping {path}: it is not a record of a job", file=sys.stderr)
    if not submitted:
        raise InputError(f"no job was submitted with logging.log_dir {logs}; --log-dir names another")
    return sorted(submitted, key=lambda record: int(record.id))


def find(logs: Path, job: str | None) -> JobRecord:
    """Return the newest job of a number or name, or the newest job of all for None; of a chain, the last job.

    Raises InputError if there is none.
    """
    submitted = records(logs)
    matches = [record for record in submitted if job in (None, record.id, record.name)]
    if not matches:
        names = sorted({name for record in submitted for name in (record.id, record.name)})
        raise InputError(f"no job {job!r} in {logs}{nearest(str(job), names)}")
    return matches[-1]


def chain_of(logs: Path, record: JobRecord) -> list[JobRecord]:
    """Return the jobs of the chain of `record`, in order, or `record` alone."""
    return [other for other in records(logs) if other.folder == record.folder]


def states(jobs: Sequence[JobRecord]) -> list[str]:
    """Return Slurm's state of each job, with its run time and limit, or the reason why it waits.

    Slurm is called once for pending and running jobs and once for ended ones, whatever their number.
    """
    known: dict[str, str] = {}
    command = ["squeue", "--me", "--noheader", "--format", "%F|%T %M of %l %R"]
    for line in _slurm(command, missing_is_empty=True).splitlines():
        number, _, state = line.strip().partition("|")
        known.setdefault(number, state)
    ended = [record.id for record in jobs if record.id not in known]
    if ended and shutil.which("sacct"):
        command = ["sacct", "--jobs", ",".join(ended), "--noheader", "--parsable2", "--allocations"]
        for line in _slurm([*command, "--format=JobID,State,Elapsed,ExitCode"], missing_is_empty=True).splitlines():
            number, *words = line.strip().split("|")
            known.setdefault(number.split("_")[0], " ".join(words))
    return [known.get(record.id, "ended") for record in jobs]


def cancel(jobs: Sequence[JobRecord]) -> None:
    """Cancel jobs: their ranks get SIGTERM, and save if Slurm's KillWait leaves enough time."""
    _slurm(["scancel", *(["--quiet"] if len(jobs) > 1 else []), *(record.id for record in jobs)])  # some may have ended


def _slurm(command: list[str], missing_is_empty: bool = False) -> str:
    if shutil.which(command[0]) is None:
        hint = ", or add --dry-run" if command[0] == "sbatch" else ""
        raise InputError(f"{command[0]} was not found; run this where Slurm's commands are{hint}")
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode and not missing_is_empty:
        raise InputError(f"{command[0]}: {' '.join(result.stderr.split())}")
    return "" if result.returncode else result.stdout
